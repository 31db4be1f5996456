"""Pass over the steps: write results into dying inputs, and new state directly to its buffer."""

from __future__ import annotations

from collections import defaultdict

from lowerdeck.emitter.ir.instructions import Code, KernelStep, Step
from lowerdeck.emitter.ir.kernels import KernelTable
from lowerdeck.emitter.ir.runtime_ops import COPY
from lowerdeck.emitter.ir.values import Role, Storage, TensorValue, root_of
from lowerdeck.emitter.memory.lifetimes import Spans, spans
from lowerdeck.torch_base import expression_of


def write_in_place(code: Code, table: KernelTable) -> None:
    """Merge storages if the output of a step may use the memory of its input.

    Requires:
        Every tensor of ``code`` has a separate storage or shares that of its base.

    Ensures:
        If an output aliases an input, the kernel is safe in place according to the table, and the
        old content is not read afterwards.
    """
    _Merger(code, table).run()


class _Merger:
    def __init__(self, code: Code, table: KernelTable) -> None:
        self._code = code
        self._table = table
        self._values: dict[Storage | None, list[TensorValue]] = defaultdict(list)
        self._uses: dict[Storage | None, list[int]] = defaultdict(list)
        self._rewritten: set[TensorValue] = set()
        seen: set[TensorValue] = set()
        for index, step in enumerate(code.steps):
            self._rewritten.update(value for value in step.writes if value in step.reads)
            for value in (*step.reads, *step.writes):
                key = value.storage
                if not self._uses[key] or self._uses[key][-1] != index:
                    self._uses[key].append(index)
                self._remember(value, seen)
        for value in (*code.inputs, *code.outputs):
            if isinstance(value, TensorValue):
                self._remember(value, seen)
        self._returned = {
            output.storage for output in code.outputs if isinstance(output, TensorValue)
        }

    def _remember(self, value: TensorValue, seen: set[TensorValue]) -> None:
        if value not in seen:
            seen.add(value)
            self._values[value.storage].append(value)

    def run(self) -> None:
        self._write_states()
        self._reuse_inputs()
        self._drop_noop_copies()
        gone = set(self._code.storages) - {
            value.storage for values in self._values.values() for value in values
        }
        self._code.storages = [s for s in self._code.storages if s not in gone]

    def _drop_noop_copies(self) -> None:
        """Remove copies from a storage to itself, inserted for kernels that mutate an argument."""
        idle = {
            index
            for index, step in enumerate(self._code.steps)
            if self._is_for_rewriting(step) and step.writes[0].storage is step.reads[0].storage
        }
        if idle:
            self._code.drop_steps(idle)

    # Buffers

    def _write_states(self) -> None:
        """Make the producers of new buffer values write directly to the buffers."""
        code = self._code
        removed = set()
        for index, step in enumerate(code.steps):
            if not self._is_write_back(step):
                continue
            producer = self._retarget(step, index)
            if producer is not None:
                removed.add(index)
            while producer is not None and self._ends_at_copy(producer):
                producer = self._retarget(code.steps[producer], producer)
        if removed:
            code.drop_steps(removed)

    def _is_write_back(self, step: Step) -> bool:
        return (
            isinstance(step, KernelStep)
            and step.origin is None
            and len(step.reads) == len(step.writes) == 1
            and step.writes[0].state
        )

    def _ends_at_copy(self, index: int) -> bool:
        """Return whether a step copies a value, at its last use, for a kernel that mutates it."""
        step = self._code.steps[index]
        if not self._is_for_rewriting(step):
            return False
        source = step.reads[0].storage
        return self._uses[source][-1] == index and source not in self._returned

    def _is_for_rewriting(self, step: Step) -> bool:
        """Return whether a step copies an argument for a kernel that mutates it."""
        if not isinstance(step, KernelStep):
            return False
        return step.kernel == COPY and step.writes[0] in self._rewritten

    def _retarget(self, step: Step, index: int) -> int | None:
        """Let the producer of a copy's source write to the destination; return its index."""
        source, state = step.reads[0], step.writes[0]
        storage, target = source.storage, state.storage
        if storage is None or target is None or not (_whole(source) and _whole(state)):
            return None
        if storage.role is not Role.ACTIVATION or _type_key(source) != _type_key(state):
            return None
        uses = self._uses[storage]
        first = uses[0]
        producer = self._code.steps[first]
        if source not in producer.writes or not isinstance(producer, KernelStep):
            return None
        if any(first in part for part in (*self._code.loops, *self._code.branches)):
            return None
        between = [i for i in self._uses[target] if first <= i < index]
        if between and (between != [first] or not self._is_in_place_safe(producer, source, state)):
            return None
        self._merge(storage, target)
        # Searching the uses is linear, so this runs only for buffers, each written back once; for
        # chains of activations it would be quadratic.
        self._uses[target] = sorted({*self._uses[target], *uses})
        return first

    def _is_in_place_safe(self, step: KernelStep, out: TensorValue, old: TensorValue) -> bool:
        """Return whether ``step`` may write ``out`` into the memory of ``old``."""
        name = step.kernel.name.partition("::")[2]
        alike = [value for value in step.reads if value.storage is old.storage]
        if any(not _whole(value) or _type_key(value) != _type_key(out) for value in alike):
            return False
        if len(step.writes) > 1 and name not in self._table.first_out_in_place:
            return False
        if self._is_for_rewriting(step) or name in self._table.in_place_safe:
            return True
        return name in self._table.writes_into_self and alike == [step.reads[0]]

    # Activations

    def _reuse_inputs(self) -> None:
        first, last = spans(self._code)
        for index, step in enumerate(self._code.steps):
            if not isinstance(step, KernelStep) or not step.writes:
                continue
            out = step.writes[0]
            storage = out.storage
            if storage is None or storage.role is not Role.ACTIVATION or not _whole(out):
                continue
            if first[storage] != index:
                continue
            for old in step.reads:
                if self._dies(old, index, last) and self._is_in_place_safe(step, out, old):
                    target = old.storage
                    assert target is not None
                    last[target] = last[storage]
                    self._merge(storage, target)
                    break

    def _dies(self, old: TensorValue, index: int, last: Spans) -> bool:
        storage = old.storage
        if storage is None or storage.role not in (Role.ACTIVATION, Role.INPUT):
            return False
        return last[storage] == index

    def _merge(self, gone: Storage, into: Storage) -> None:
        into.nbytes = max(into.nbytes, gone.nbytes)
        moved = self._values.pop(gone)
        for value in moved:
            value.storage = into
        self._values[into] += moved


def _whole(value: TensorValue) -> bool:
    """Return whether ``value`` covers its whole storage."""
    root, offset = root_of(value)
    return offset == 0 and root.nbytes == value.nbytes


def _type_key(value: TensorValue) -> tuple[object, ...]:
    """Return a key that is equal for two tensors of equal dtype, shape and layout."""
    shape = tuple(map(expression_of, value.shape))
    return (value.dtype, shape, value.sizes, value.dim_order)
