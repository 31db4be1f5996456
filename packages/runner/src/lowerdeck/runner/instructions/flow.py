"""Control flow of a chain."""

from __future__ import annotations

from collections.abc import Sequence

from lowerdeck.serializer import JumpFalseCall


def successors(code: Sequence[object]) -> list[tuple[int, ...]]:
    """Return the possible successors of each instruction; the length of ``code`` means the end.

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
