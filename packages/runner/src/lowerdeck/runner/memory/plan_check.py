"""Proof of a memory plan: whatever is read is what was written last under that name.

The code is followed without being run, from instruction to instruction and on every way that
jumps can take, with a map that tells whose value each byte of planned memory holds. A read of
bytes that hold something else is refused before the first call. Four things cannot be told:

- The file does not say that a value is only another name for the bytes of another one (a reshape
  or slice that shares memory): a value that nothing writes is taken for a name of whatever lies
  there whole. So a plan in which such a name, or the value that it should name, was moved may
  pass, unless a result would be left that nobody reads. Names of the same shape, which are of no
  use, are in right files too: ExecuTorch leaves out the copy that a reshape to its own shape is.
  Right plans that share memory have such names (145 of ours have 612), so they cannot be
  refused. To ask that a name is a run of rows of the other's shape would find 14 of 64 such
  plans, and refuse 4 of those 612 names.
- Sizes are upper bounds: a plan is checked as if every value had its largest shape.
- Where branches meet, a register that may lie on several values is right if any of them is.
- An ``et_copy_index`` is taken to fill all rows before anyone reads them. What it has filled must
  be there when it fills the next one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

from lowerdeck.runner.errors import MemoryPlanError
from lowerdeck.runner.instructions import BoundChain, Instruction
from lowerdeck.runner.memory.owners import NOBODY, OwnerMap, Owners
from lowerdeck.runner.memory.ranges import Range, overlap
from lowerdeck.runner.operators import COPY_INDEX
from lowerdeck.runner.values.tensors import Origin, TensorSpec
from lowerdeck.serializer import MoveCall

MAX_STEPS = 50_000_000
"""How many looks at a range of bytes a check may take: minutes, for a file made to take hours."""

_Location = tuple[int, int]
"""Number of a chain, index of an instruction; index -1 is before the first one."""


@dataclass(slots=True)
class _State:
    """What is known before an instruction.

    Attributes:
        bytes: Whose value each byte holds.
        lies_on: For each register that was rebound, the values on whose bytes it may lie.
        written: The values that this call has written on some way.
    """

    bytes: OwnerMap
    lies_on: dict[int, Owners]
    written: set[int]

    def copy(self) -> _State:
        return _State(self.bytes.copy(), dict(self.lies_on), set(self.written))

    def join(self, other: _State) -> bool:
        changed = self.bytes.join(other.bytes)
        for register in self.lies_on.keys() | other.lies_on.keys():
            own = frozenset((register,))
            known = self.lies_on.get(register, own)
            both = known | other.lies_on.get(register, own)
            changed |= both != known
            self.lies_on[register] = both
        changed |= not other.written <= self.written
        self.written |= other.written
        return changed


class PlanCheck:
    """Checks the memory plan of one method.

    Args:
        method: Name of the method, for messages.
        specs: What the file says of each tensor value.
        chains: Its code.
        memories: Number of its memories.
        inputs: Values that the caller gives.
        outputs: Values that the caller takes.

    Attributes:
        steps: How many ranges of bytes were looked at.
        names: The values that nothing writes, taken for other names of what lies there, with
            the instruction that reads each first.

    Raises:
        MemoryPlanError: An instruction reads bytes that hold another value.
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
        self.names: dict[int, _Location] = {}
        self._method = method
        self._chains = chains
        self._inputs = inputs
        self._outputs = outputs
        self._planned = {
            index: (spec.memory_id, spec.offset, spec.offset + spec.nbytes)
            for index, spec in enumerate(specs)
            if spec is not None and spec.origin is Origin.PLANNED and spec.nbytes
        }
        self._specs = specs
        self._parent: dict[int, int] = {}
        self._writers: dict[int, _Location] = {}
        self._read_values: set[int] = set()
        self._lost_rows: dict[int, int] = {}
        self._looks_back = False
        items = [item for chain in chains for item in chain.instructions]
        self._ever_written = {
            index for item in items if item.renames is None for index in item.writes
        }
        self._followers = _followers(items)
        entry = _State(OwnerMap(memories), {}, set())
        self._give_state(entry)
        # What one call leaves is what the next one finds; most programs look at none of it, and
        # to follow them once more would be a fifth of the time to load them.
        while self._is_seen_next(left := self._call(entry.copy()), entry) and entry.join(left):
            entry.written.clear()
        for index, writer in self._lost_rows.items():
            if index in self._read_values:
                self._fail_overwritten(writer, index, self._writers[index])
        self._refuse_lost_names(items)

    def _give_state(self, entry: _State) -> None:
        """Let state own its bytes; a part of a state that has its name is a name for that part."""
        kept = [index for index in self._planned if self._has_state(index)]
        outer = -1
        named: dict[str, int] = {}
        for index in sorted(kept, key=lambda index: _outermost_first(self._planned[index])):
            if outer >= 0 and self._is_part(index, outer):
                self._parent[index] = outer
                continue
            outer, spec = index, self._specs[index]
            name = spec.name if spec is not None else ""
            if name and named.setdefault(name, index) != index:
                self._fail(
                    (0, -1), f"values {named[name]} and {index} are both {name!r}, at two offsets"
                )
            entry.bytes.give(*self._planned[index], frozenset((index,)))

    def _has_state(self, index: int) -> bool:
        spec = self._specs[index]
        return spec is not None and spec.has_state

    def _is_part(self, index: int, outer: int) -> bool:
        one, other = self._specs[index], self._specs[outer]
        inner, around = self._planned[index], self._planned[outer]
        within = inner[0] == around[0] and around[1] <= inner[1] and inner[2] <= around[2]
        return within and one is not None and other is not None and one.name == other.name

    def _is_seen_next(self, left: _State, entry: _State) -> bool:
        """Return whether a call may find what a call before it left, other than its state."""
        return (
            self._looks_back
            or bool(left.lies_on)
            or any(
                left.bytes.of(*where) != entry.bytes.of(*where)
                for index, where in self._planned.items()
                if self._has_state(index)
            )
        )

    def _call(self, state: _State) -> _State:
        """Follow one call, and return what it leaves."""
        for index in self._inputs:
            self._write(index, state, (0, -1))
        for number, chain in enumerate(self._chains):
            state = self._follow(number, chain, state)
        for index in self._outputs:
            self._read(index, state, (len(self._chains) - 1, -1))
        state.written = set()
        return state

    def _follow(self, number: int, chain: BoundChain, state: _State) -> _State:
        """Follow a chain on all ways, and return what is known at its end."""
        end = len(chain.instructions)
        if not chain.jumps:
            for index in range(end):
                self._step((number, index), chain.instructions[index], state)
            return state
        met = {0, end}
        for index, follow in enumerate(chain.follow):
            if follow != (index + 1,):
                met.update(follow)
        before: dict[int, _State] = {0: state}
        pending = [0]
        while pending:
            index = pending.pop()
            now = before[index].copy()
            self._count(len(now.lies_on) + 1)
            if index == end:
                continue
            while True:
                self._step((number, index), chain.instructions[index], now)
                follow = chain.follow[index]
                if len(follow) > 1 or follow[0] in met:
                    break
                index = follow[0]
            for target in set(follow):
                if target not in before:
                    before[target] = now.copy()
                elif not before[target].join(now):
                    continue
                pending.append(target)
        return before.get(end, state)

    def _step(self, at: _Location, item: Instruction, state: _State) -> None:
        if item.renames is not None:
            source, target = item.renames
            under = self._under(source, state)
            state.lies_on[target] = under
            for follower in self._followers.get(target, ()):
                state.lies_on[follower] = self._under(follower, state) | under
            return
        for index in item.reads:
            if item.name == COPY_INDEX and index in item.writes:
                self._note_lost_rows(index, state)
            else:
                self._read(index, state, at)
        if item.writes:
            self._refuse_overlaps(at, item, state)
        for index in item.writes:
            self._write(index, state, at)

    def _under(self, index: int, state: _State) -> Owners:
        return state.lies_on.get(index) or frozenset((index,))

    def _read(self, index: int, state: _State, at: _Location) -> None:
        under = self._under(index, state)
        for value in under:
            where = self._planned.get(value)
            if where is None:
                continue
            found = state.bytes.of(*where)
            self._count(len(found))
            self._read_values.update(*found)
            if found != {frozenset((value,))}:
                self._looks_back |= any(NOBODY in owners for owners in found)
                self._examine(value, found, state, at, under)

    def _examine(
        self, index: int, found: set[Owners], state: _State, at: _Location, under: Owners
    ) -> None:
        """Accept bytes that hold not just the value ``index``, or refuse them."""
        owners = frozenset().union(*found)
        # A register that lies here on one way and there on another may hold either value.
        groups = {self._group(value) for value in under}
        strangers = {o for o in owners if o != NOBODY and self._group(o) not in groups}
        if not self._has_state(index) and index not in state.written:
            if strangers and NOBODY not in owners and len(found) == 1:
                self._bind_name(index, strangers, state, at)
                return
            if owners == {NOBODY} and index in self._ever_written:
                # State without a name: its bytes come from the call before.
                state.bytes.add(*self._planned[index], frozenset((index,)))
                return
        if strangers:
            self._fail_overwritten(min(strangers), index, at)
        if index not in self._ever_written and NOBODY in owners:
            self._fail(at, f"reads value {index}, whose bytes nothing has been written to")

    def _bind_name(self, index: int, values: set[int], state: _State, at: _Location) -> None:
        """Take ``index`` for another name of ``values``, one of which lies there whole."""
        for other in values:
            if not self._may_name(index, other):
                self._fail(at, f"reads value {index}, whose bytes hold value {other}")
            self._parent[self._group(other)] = self._group(index)
        state.written.add(index)
        self.names.setdefault(index, at)

    def _may_name(self, index: int, other: int) -> bool:
        """Return whether bytes can be seen so: their numbers are as wide, or are a part."""
        one, two = self._specs[index], self._specs[other]
        if one is None or two is None:
            return False
        return (
            one.dtype.itemsize == two.dtype.itemsize
            or one.dtype.is_complex
            or two.dtype.is_complex
        )

    def _refuse_lost_names(self, items: Sequence[Instruction]) -> None:
        """Refuse a result that nobody reads while later a name of its size reads something else.

        Compilers leave no such result, but for the further ones of kernels with several, and for
        those of loops and branches: a register that several instructions write or that is moved,
        and rows that a loop fills.
        """
        writers = Counter(index for item in items if item.renames is None for index in item.writes)
        moved = {
            item.renames[0]
            for item in items
            if item.renames is not None and item.name == MoveCall.__name__
        }
        latest: dict[tuple[int, int], _Location] = {}
        for index, at in self.names.items():
            latest[self._size(index)] = max(at, latest.get(self._size(index), at))
        for item in items:
            for index in item.writes:
                if len(item.writes) > 1 or item.renames is not None or self._has_state(index):
                    continue
                if writers[index] > 1 or index in moved or index in item.reads:
                    continue
                unread = index in self._planned and index not in self._read_values
                at = self._writers.get(index, (0, -1))
                if unread and at < latest.get(self._size(index), at):
                    self._fail(
                        at,
                        f"writes value {index}, which nobody reads, while a name for bytes of its "
                        "size reads another value",
                    )

    def _size(self, index: int) -> tuple[int, int]:
        spec = self._specs[index]
        return (0, 0) if spec is None else (spec.dtype.itemsize, spec.nbytes)

    def _note_lost_rows(self, index: int, state: _State) -> None:
        """Record rows that earlier turns of a loop filled and that a later turn overwrites."""
        for value in self._under(index, state) & state.written:
            found = state.bytes.of(*self._planned[value]) if value in self._planned else ()
            self._looks_back |= any(NOBODY in owners for owners in found)
            for owners in found:
                if self._group(value) not in map(self._group, owners - {NOBODY}):
                    self._lost_rows.setdefault(value, min(owners))

    def _write(self, index: int, state: _State, at: _Location) -> None:
        under = self._under(index, state)
        for value in under:
            where = self._planned.get(value)
            if where is None:
                continue
            self._count(1)
            (state.bytes.give if len(under) == 1 else state.bytes.add)(*where, frozenset((value,)))
            state.written.add(value)
            self._ever_written.add(value)
            self._writers[value] = at

    def _refuse_overlaps(self, at: _Location, item: Instruction, state: _State) -> None:
        """Refuse results that lie on one another, or on inputs unless the kernel bears it."""
        written = sorted(self._ranges(item.writes, state))
        for (one, first), (other, second) in pairwise(written):
            if first != second and overlap(one, other):
                self._fail(at, f"writes values {first} and {second} at once onto the same bytes")
        starts = [where for where, _ in written]
        for where, index in self._ranges(item.reads, state):
            self._count(1)
            last = bisect_left(starts, (where[0], where[2], 0))
            for number in range(last - 1, -1, -1):
                there, target = written[number]
                if not overlap(there, where):
                    break
                if item.name == COPY_INDEX and target == index:
                    continue
                alike = where == there and self._alike(index, target)
                if index not in item.in_place or not alike:
                    self._fail(at, f"writes value {target} onto its own input, value {index}")

    def _ranges(self, values: Collection[int], state: _State) -> list[tuple[Range, int]]:
        return [
            (self._planned[value], index)
            for index in values
            for value in self._under(index, state)
            if value in self._planned
        ]

    def _alike(self, index: int, other: int) -> bool:
        """Return whether two values on the same bytes have their elements in one order."""
        one, two = self._specs[index], self._specs[other]
        if one is None or two is None or one.dtype != two.dtype:
            return False
        return (one.contiguous and two.contiguous) or one.dim_order == two.dim_order

    def _group(self, index: int) -> int:
        parent = self._parent
        while (up := parent.get(index, index)) != index:
            parent[index] = parent.get(up, up)
            index = up
        return index

    def _fail_overwritten(self, writer: int, index: int, at: _Location) -> NoReturn:
        written_at = self._writers.get(writer, at)
        self._fail(written_at, f"writes value {writer} onto value {index}, needed later")

    def _fail(self, at: _Location, problem: str) -> NoReturn:
        chain, index = at
        known = self._chains[chain].instructions if chain < len(self._chains) else ()
        raise MemoryPlanError(
            f"{problem}; the memory plan is broken",
            method=self._method,
            instruction=index,
            operator=known[index].name if index >= 0 else "the inputs and outputs",
        )

    def _count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise MemoryPlanError(
                f"the memory plan takes more than {MAX_STEPS} steps to check; if you trust the "
                "file, load it with memory='unchecked'",
                method=self._method,
            )


def _outermost_first(where: Range) -> Range:
    memory, start, end = where
    return memory, start, -end


def _followers(items: Sequence[Instruction]) -> dict[int, set[int]]:
    """Return, for each register, those that moves may have made the same tensor."""
    found: dict[int, set[int]] = {}
    for item in items:
        if item.renames is not None and item.name == MoveCall.__name__:
            found.setdefault(item.renames[0], set()).add(item.renames[1])
    return found
