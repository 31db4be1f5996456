"""Check that a memory plan does not overwrite live bytes.

The check is approximate:

- Files do not mark aliases, such as reshapes that share memory. A value that is read but not
  written counts as an alias of the last written value that contains its bytes, so a plan that
  moves the alias or its base may pass.
- Dynamic sizes count with their upper bounds.
- A register may alias any value that is moved or viewed to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch

from lowerdeck.runner.errors import MemoryPlanError
from lowerdeck.runner.instructions import BoundChain, Instruction
from lowerdeck.runner.memory.liveness import Bits, Groups, Liveness, Range, analyse
from lowerdeck.runner.operators.kernels import VIEW
from lowerdeck.runner.values.tensors import Origin, TensorSpec
from lowerdeck.serializer import MoveCall

MAX_BITS = 1 << 33
"""Limit of instructions times values: liveness needs a bit for each, and files are untrusted."""

_Location = tuple[int, int]
"""Chain number and instruction index; -1 is before the first instruction."""

_RENAMES = {VIEW, MoveCall.__name__}
"""Instructions that write no bytes."""


def overlap(one: Range, other: Range) -> bool:
    """Return whether two ranges share a byte."""
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


class MemoryPlan:
    """Checked memory plan of one method.

    Args:
        specs: Specs of tensor values, None for others.
        moves: Pairs of registers (from, to) that share memory.
        inputs: Indices of the input values.
        outputs: Indices of the output values.

    Attributes:
        ranges: Byte range of each planned value.

    Raises:
        MemoryPlanError: An instruction overwrites a live value, or reads one that is never
            written; a state has two locations; or the method is too large to check.
    """

    def __init__(
        self,
        method: str,
        specs: Sequence[TensorSpec | None],
        chains: Sequence[BoundChain],
        moves: Sequence[tuple[int, int]],
        *,
        inputs: Sequence[int],
        outputs: Sequence[int],
    ) -> None:
        self._method = method
        self._specs = specs
        self._chains = chains
        self._inputs = inputs
        self._outputs = outputs
        if sum(len(chain.instructions) for chain in chains) * len(specs) > MAX_BITS:
            raise MemoryPlanError(
                "the method is too large to check its memory plan; if you trust the file, load it "
                "with memory='unchecked'",
                method=method,
            )
        self.ranges: dict[int, Range] = {
            spec.index: (spec.memory_id, spec.offset, spec.offset + spec.nbytes)
            for spec in specs
            if spec is not None and spec.origin is Origin.PLANNED and spec.nbytes
        }
        self._table = torch.tensor(list(self.ranges.values())).reshape(-1, 3).T
        self._sharing: dict[Range, Bits] = {}
        self._moves = moves
        self._state = [spec.index for spec in specs if spec is not None and spec.has_state]
        aliases = list(self._parts_of_state())
        self._analyse(aliases)
        # Liveness reveals aliases: values that are read before any write.
        if implicit := self._find_aliases():
            self._analyse([*aliases, *implicit])
        self._check()

    def _analyse(self, aliases: Sequence[tuple[int, int]]) -> None:
        self.groups: Groups = Groups(len(self._specs), aliases, self._moves, self.ranges)
        self.liveness: Liveness = analyse(
            self._chains,
            self.groups,
            inputs=self._inputs,
            outputs=self._outputs,
            state=self._state,
        )

    def _parts_of_state(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of a state and a part of it with the same name."""
        named = [spec for spec in self._specs if spec is not None and spec.has_state and spec.name]
        states: dict[str, TensorSpec] = {}
        for part in sorted(named, key=lambda spec: -spec.nbytes):
            state = states.setdefault(part.name, part)
            if not _contains(state, part):
                self._fail(
                    (0, -1),
                    f"values {state.index} and {part.index} store the state {part.name!r} at two "
                    "locations",
                )
            if state is not part:
                yield state.index, part.index

    def _find_aliases(self) -> list[tuple[int, int]]:
        """Return pairs (base, alias); the base is the last written value around the alias."""
        kept = self.liveness.kept
        pending = {
            index
            for index in self.ranges.keys() - set(self._state)
            if kept >> self.groups.of(index) & 1
        }
        if not pending:
            return []
        items = [
            ((number, index), item)
            for number, chain in enumerate(self._chains)
            for index, item in enumerate(chain.instructions)
        ]
        ever_written = {index for _, item in items for index in item.writes}
        items.append(((0, -1), Instruction("", tuple(self._outputs))))
        pairs = []
        written = list(self._inputs)
        for at, item in items:
            for index in pending.intersection(item.reads):
                pending.discard(index)
                base = self._last_containing(index, written)
                if base is not None:
                    pairs.append((base, index))
                elif index not in ever_written:
                    self._fail(at, f"reads value {index}, which is never written")
            # Values that are written before their first read are not aliases.
            pending.difference_update(item.writes)
            written += item.writes
        return pairs

    def _last_containing(self, index: int, written: Sequence[int]) -> int | None:
        alias = self._specs[index]
        assert alias is not None
        for other in reversed(written):
            spec = self._specs[other]
            if spec is not None and other != index and _contains(spec, alias):
                # Aliases have equal element sizes, or are parts of complex numbers.
                is_complex = spec.dtype.is_complex or alias.dtype.is_complex
                same_width = spec.dtype.itemsize == alias.dtype.itemsize
                return other if same_width or is_complex else None
        return None

    def _check(self) -> None:
        live, kept = self.liveness, self.groups.bits(self._state)
        for index in self._state:
            self._require_free(index, kept, (0, -1))
        later = 0
        for index in reversed(self._inputs):
            self._require_free(index, live.at_start & ~later, (0, -1))
            later |= self.groups.bits((index,))
        for number, chain in enumerate(self._chains):
            for at, item in enumerate(chain.instructions):
                if item.name not in _RENAMES:
                    self._check_write((number, at), item, live.after[number][at])

    def _check_write(self, at: _Location, item: Instruction, live: Bits) -> None:
        for index in self.ranges.keys() & set(item.writes):
            where = self.ranges[index]
            for other in item.writes:
                if other != index and overlap(where, self.ranges.get(other, (-1, 0, 0))):
                    self._fail(at, f"writes both values {index} and {other} onto the same bytes")
            for source in item.reads:
                if overlap(where, self.ranges.get(source, (-1, 0, 0))) and not (
                    source in item.in_place and self._have_equal_layout(source, index)
                ):
                    self._fail(at, f"writes value {index} onto its own input, value {source}")
            self._require_free(index, live, at)

    def _require_free(self, index: int, live: Bits, at: _Location) -> None:
        """Reject a write to bytes of a live value in another group."""
        where = self.ranges.get(index)
        if where is None:
            return
        blocking = self._groups_at(where) & live & ~self.groups.bits((index,))
        if blocking:
            other = next(
                other
                for other, range_ in self.ranges.items()
                if blocking >> self.groups.of(other) & 1 and overlap(where, range_)
            )
            self._fail(at, f"writes value {index} onto value {other}, which is read later")

    def _groups_at(self, where: Range) -> Bits:
        """Return the groups that overlap a range."""
        if where not in self._sharing:
            memories, starts, ends = self._table
            memory, start, end = where
            shares = (memories == memory) & (starts < end) & (ends > start)
            planned = list(self.ranges)
            hits = shares.nonzero().flatten().tolist()
            self._sharing[where] = self.groups.bits(planned[hit] for hit in hits)
        return self._sharing[where]

    def _have_equal_layout(self, index: int, other: int) -> bool:
        """Return whether two values have equal byte ranges, dtypes and element orders."""
        spec, other_spec = self._specs[index], self._specs[other]
        assert spec is not None
        assert other_spec is not None
        return (
            self.ranges[index] == self.ranges[other]
            and spec.dtype == other_spec.dtype
            and (
                (spec.contiguous and other_spec.contiguous)
                or spec.dim_order == other_spec.dim_order
            )
        )

    def _fail(self, at: _Location, problem: str) -> NoReturn:
        chain, index = at
        name = "the inputs and outputs"
        if index >= 0:
            name = self._chains[chain].instructions[index].name
        raise MemoryPlanError(
            f"{problem}; the memory plan is broken",
            method=self._method,
            instruction=index,
            operator=name,
        )


def _contains(outer: TensorSpec, inner: TensorSpec) -> bool:
    return (
        outer.origin is Origin.PLANNED
        and outer.memory_id == inner.memory_id
        and outer.offset <= inner.offset
        and inner.offset + inner.nbytes <= outer.offset + outer.nbytes
    )
