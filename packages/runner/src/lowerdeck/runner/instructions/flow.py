"""The order in which instructions may run: successors, and what is written on every way."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lowerdeck.serializer import JumpFalseCall


def successors(code: Sequence[object]) -> list[tuple[int, ...]]:
    """Return, for each instruction of a chain, those that may run next; the length is the end.

    Args:
        code: The ``instr_args`` of the chain.
    """
    end = len(code)
    return [
        (index + 1, min(item.destination_instruction, end))
        if isinstance(item, JumpFalseCall)
        else (index + 1,)
        for index, item in enumerate(code)
    ]


def always_written(
    code: Sequence[object],
    writes: Sequence[Collection[int]],
    given: Collection[int],
    wanted: Collection[int],
) -> dict[int, frozenset[int]]:
    """Return, for the instructions ``wanted``, the values that hold something on every way there.

    Args:
        code: The ``instr_args`` of a chain.
        writes: What each instruction writes.
        given: What holds something at the start.
        wanted: Indices of instructions.
    """
    if not wanted:
        return {}
    if not any(isinstance(item, JumpFalseCall) for item in code):
        held, found = set(given), {}
        for index, written in enumerate(writes):
            if index in wanted:
                found[index] = frozenset(held)
            held.update(written)
        return found
    # Sets as bits of integers: a method with jumps may need one at every instruction.
    masks = [sum(1 << value for value in set(written)) for written in writes]
    before: list[int | None] = [None] * (len(code) + 1)
    before[0] = sum(1 << value for value in set(given))
    follow = successors(code)
    pending = [0]
    while pending:
        index = pending.pop()
        state = before[index]
        if state is None or index == len(code):
            continue
        after = state | masks[index]
        for target in follow[index]:
            known = before[target]
            merged = after if known is None else known & after
            if merged != known:
                before[target] = merged
                pending.append(target)
    return {index: _members(before[index] or 0) for index in wanted}


def _members(mask: int) -> frozenset[int]:
    return frozenset(index for index, bit in enumerate(reversed(bin(mask)[2:])) if bit == "1")
