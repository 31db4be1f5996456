"""Check of a memory plan: every read must find the value that the instruction names.

The instructions are followed without running a kernel, from call to call, and every jump at most
twice, which covers the second iteration of loops. An interval map records which value the bytes
of planned memory contain. Three kinds of faults are not found:

- A file does not mark aliases, such as a reshape that shares memory. A value that no instruction
  writes is taken for an alias of the value that fills its bytes, so a plan in which the alias or
  its base was moved may pass. 145 of our own plans have 612 such values: they cannot be refused.
- Sizes are upper bounds, and not every combination of branches is followed.
- The first ``et_copy_index`` counts as filling all rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from lowerdeck.runner.errors import MemoryPlanError
from lowerdeck.runner.instructions import BoundChain, Instruction
from lowerdeck.runner.memory.owners import UNWRITTEN, OwnerMap
from lowerdeck.runner.operators import COPY_INDEX
from lowerdeck.runner.values.tensors import Origin, TensorSpec
from lowerdeck.serializer import MoveCall

MAX_STEPS = 50_000_000
"""Limit of the looked-up byte ranges of a check, which a hostile file could make take hours."""

_Location = tuple[int, int]
"""Number of a chain, index of an instruction; index -1 is before the first one."""


@dataclass(slots=True)
class _State:
    """Contents of memory and registers before an instruction.

    Attributes:
        owners: The value that each byte of planned memory contains.
        tensors: By register: the register whose tensor object was moved to it.
        storage: By tensor object: the value whose bytes a view instruction made it share.
        written: The values that this call has written.
    """

    owners: OwnerMap
    tensors: dict[int, int] = field(default_factory=dict)
    storage: dict[int, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)

    def copy(self) -> _State:
        return _State(
            self.owners.copy(),
            dict(self.tensors),
            dict(self.storage),
            set(self.written),
        )

    def value(self, register: int) -> int:
        """Return the value whose bytes the tensor in a register has."""
        tensor = self.tensors.get(register, register)
        return self.storage.get(tensor, tensor)


class PlanCheck:
    """Checker of one method's memory plan.

    Args:
        method: Name of the method, for messages.
        specs: The tensor values of the file.
        chains: Code of the method.
        memories: Number of its memories.
        inputs: The inputs of the method.
        outputs: The outputs of the method.

    Attributes:
        steps: Number of byte ranges looked up.

    Raises:
        MemoryPlanError: An instruction reads bytes that contain another value.
    """

    def __init__(
        self,
        method: str,
        specs: Sequence[TensorSpec | None],
        chains: Sequence[BoundChain],
        memories: int,
        *,
        inputs: Sequence[int],
        outputs: Sequence[int],
    ) -> None:
        self.steps: int = 0
        self._method = method
        self._specs = specs
        self._chains = chains
        self._inputs = inputs
        self._outputs = outputs
        self._planned = {
            index: (spec.memory_id, spec.offset, spec.offset + spec.nbytes)
            for index, spec in enumerate(specs)
            if spec is not None and spec.origin is Origin.PLANNED and spec.nbytes
        }
        items = [item for chain in chains for item in chain.instructions if item.renames is None]
        self._ever_written = {*inputs, *(index for item in items for index in item.writes)}
        self._bases: dict[int, int] = {}
        self._writers: dict[int, _Location] = {}
        self._reads_former_call = False
        self._read_values: set[int] = set()
        self._lost_rows: dict[int, int] = {}
        entry = _State(OwnerMap(memories))
        self._give_state(entry)
        for left in self._call(entry.copy()):
            # Most methods read nothing of the previous call: following a second call would take a
            # fifth of the time to load them.
            if self._is_seen_next(left, entry):
                left.written.clear()
                self._call(left)
        for index, writer in self._lost_rows.items():
            if index in self._read_values:
                self._fail_overwritten(writer, index, self._writers[index])

    def _give_state(self, entry: _State) -> None:
        """Assign the bytes of state; a part of a state with the same name is an alias of it."""
        outer = -1
        named: dict[str, int] = {}
        kept = [index for index in self._planned if self._has_state(index)]
        # The outermost value of nested ones comes first.
        for index in sorted(kept, key=lambda i: (*self._planned[i][:2], -self._planned[i][2])):
            memory, start, end = self._planned[index]
            name = self._name(index)
            around = self._planned.get(outer, (-1, 0, 0))
            if around[0] == memory and end <= around[2] and self._name(outer) == name:
                self._bases[index] = outer
                continue
            outer = index
            if name and named.setdefault(name, index) != index:
                self._fail(
                    (0, -1), f"values {named[name]} and {index} are both {name!r}, at two offsets"
                )
            entry.owners.give(memory, start, end, index)

    def _has_state(self, index: int) -> bool:
        spec = self._specs[index]
        return spec is not None and spec.has_state

    def _name(self, index: int) -> str:
        spec = self._specs[index]
        return "" if spec is None else spec.name

    def _is_seen_next(self, left: _State, entry: _State) -> bool:
        """Return whether the next call may read values of this call, apart from its state."""
        return (
            self._reads_former_call
            or bool(left.tensors or left.storage)
            or any(
                left.owners.of(*where) != entry.owners.of(*where)
                for index, where in self._planned.items()
                if self._has_state(index)
            )
        )

    def _call(self, state: _State) -> list[_State]:
        """Follow one call; return the states at its end, one for each path."""
        for index in self._inputs:
            self._write(index, state, (0, -1))
        jumps: Counter[tuple[int, int, int]] = Counter()
        ends: list[_State] = []
        pending = [(0, 0, state)]
        while pending:
            number, index, state = pending.pop()
            while number < len(self._chains):
                chain = self._chains[number]
                if index == len(chain.instructions):
                    number, index = number + 1, 0
                    continue
                self._step((number, index), chain.instructions[index], state)
                follow = chain.follow[index]
                if follow != (index + 1,):
                    for target in set(follow):
                        jumps[number, index, target] += 1
                        if jumps[number, index, target] <= 2:
                            self._count(len(state.written))
                            pending.append((number, target, state.copy()))
                    break
                index += 1
            else:
                for output in self._outputs:
                    self._read(output, state, (len(self._chains) - 1, -1))
                ends.append(state)
        return ends

    def _step(self, at: _Location, item: Instruction, state: _State) -> None:
        if item.renames is not None:
            source, target = item.renames
            if item.name == MoveCall.__name__:
                state.tensors[target] = state.tensors.get(source, source)
            else:
                state.storage[state.tensors.get(target, target)] = state.value(source)
            return
        for index in item.reads:
            if item.name == COPY_INDEX and index in item.writes:
                self._note_lost_rows(state.value(index), state)
            else:
                self._read(index, state, at)
        for index in item.writes:
            self._write(index, state, at)
        if item.writes:
            self._check_overlaps(at, item, state)

    def _read(self, index: int, state: _State, at: _Location) -> None:
        value = state.value(index)
        where = self._planned.get(value)
        if where is None:
            return
        owners = state.owners.of(*where)
        self._count(len(owners))
        self._read_values |= owners
        if owners == {value}:
            return
        self._reads_former_call |= UNWRITTEN in owners
        others = {o for o in owners if o != UNWRITTEN and self._base(o) != self._base(value)}
        if not self._has_state(value) and value not in state.written:
            if others and len(owners) == 1:
                self._bind_alias(value, min(others), state, at)
                return
            if owners == {UNWRITTEN} and value in self._ever_written:
                # State without a name: its bytes come from the previous call.
                state.owners.give(*where, value)
                return
        if others:
            self._fail_overwritten(min(others), value, at)
        if value not in self._ever_written and UNWRITTEN in owners:
            self._fail(at, f"reads value {value}, whose bytes nothing has been written to")

    def _bind_alias(self, alias: int, base: int, state: _State, at: _Location) -> None:
        """Take a value that nothing has written for an alias of the value that fills its bytes."""
        alias_spec, base_spec = self._specs[alias], self._specs[base]
        assert alias_spec is not None
        assert base_spec is not None
        is_complex = alias_spec.dtype.is_complex or base_spec.dtype.is_complex
        # Aliases have elements of one width, or are the parts of complex numbers.
        if alias_spec.dtype.itemsize != base_spec.dtype.itemsize and not is_complex:
            self._fail(at, f"reads value {alias}, whose bytes hold value {base}")
        self._bases[self._base(base)] = self._base(alias)
        state.written.add(alias)

    def _note_lost_rows(self, value: int, state: _State) -> None:
        """Record rows of earlier loop iterations that were overwritten since."""
        owners = state.owners.of(*self._planned[value]) if value in self._planned else set()
        self._reads_former_call |= UNWRITTEN in owners
        others = {o for o in owners if o != UNWRITTEN and self._base(o) != self._base(value)}
        # If nothing is left of the rows, the loop starts again.
        if others and others != owners and value in state.written:
            self._lost_rows.setdefault(value, min(others))

    def _write(self, index: int, state: _State, at: _Location) -> None:
        value = state.value(index)
        if value in self._planned:
            self._count(1)
            state.owners.give(*self._planned[value], value)
            state.written.add(value)
            self._writers[value] = at

    def _check_overlaps(self, at: _Location, item: Instruction, state: _State) -> None:
        """Reject results on the bytes of each other, or of inputs unless the kernel permits it."""
        results = {state.value(index): index for index in item.writes}
        for value, index in results.items():
            where = self._planned.get(value)
            others = state.owners.of(*where) - {value} if where else ()
            for other in others:
                self._fail(
                    at, f"writes values {index} and {results[other]} at once onto the same bytes"
                )
        for index in item.reads:
            value = state.value(index)
            where = self._planned.get(value)
            self._count(1)
            for result in (state.owners.of(*where) if where else set()) & results.keys():
                if item.name == COPY_INDEX and result == value:
                    continue
                same = where == self._planned[result] and self._have_equal_layout(value, result)
                if index not in item.in_place or not same:
                    self._fail(
                        at, f"writes value {results[result]} onto its own input, value {index}"
                    )

    def _have_equal_layout(self, index: int, other: int) -> bool:
        """Return whether two values on the same bytes have their elements in the same order."""
        spec, other_spec = self._specs[index], self._specs[other]
        if spec is None or other_spec is None or spec.dtype != other_spec.dtype:
            return False
        return (
            spec.contiguous and other_spec.contiguous
        ) or spec.dim_order == other_spec.dim_order

    def _base(self, index: int) -> int:
        """Return the representative of a value and its aliases."""
        bases = self._bases
        while (base := bases.get(index, index)) != index:
            bases[index] = bases.get(base, base)
            index = base
        return index

    def _fail_overwritten(self, writer: int, index: int, at: _Location) -> NoReturn:
        written_at = self._writers.get(writer, at)
        self._fail(written_at, f"writes value {writer} onto value {index}, needed later")

    def _fail(self, at: _Location, problem: str) -> NoReturn:
        chain, index = at
        instructions = self._chains[chain].instructions if chain < len(self._chains) else ()
        raise MemoryPlanError(
            f"{problem}; the memory plan is broken",
            method=self._method,
            instruction=index,
            operator=instructions[index].name if index >= 0 else "the inputs and outputs",
        )

    def _count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise MemoryPlanError(
                f"the memory plan takes more than {MAX_STEPS} steps to check; if you trust the "
                "file, load it with memory='unchecked'",
                method=self._method,
            )
