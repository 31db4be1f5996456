"""Bound instructions of a method and their control flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lowerdeck.runner.errors import ExecutionError
from lowerdeck.serializer import JumpFalseCall

Step = Callable[[], int | None]
"""Runs one instruction; returns the jump target, or a non-int to continue with the next one."""

Observer = Callable[[int, int, Step], int | None]
"""Runs a step, given its chain and index, and returns its result."""


class Instruction(NamedTuple):
    """Effects of one instruction.

    Attributes:
        name: Operator, such as ``aten::add.out``.
        reads: Values that the instruction reads, including list items.
        writes: Values that the instruction writes, including list items.
        overwrites: The subset of ``writes`` that is overwritten completely.
        in_place: The subset of ``reads`` that may share memory with a result.
    """

    name: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    overwrites: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()


class BoundChain(NamedTuple):
    """Chain with bound instructions.

    Attributes:
        steps: Function of each instruction.
        instructions: Effects of each instruction.
        follow: Possible successors of each instruction; the length of the chain is the end.
        jumps: Whether any instruction jumps.
    """

    steps: tuple[Step, ...]
    instructions: tuple[Instruction, ...]
    follow: tuple[tuple[int, ...], ...]
    jumps: bool


def run_chains(
    chains: Sequence[BoundChain], method: str, limit: int, observer: Observer | None = None
) -> None:
    """Run all chains in order.

    Args:
        method: Name of the method, for messages.
        limit: Maximum number of executed instructions; it ends endless loops.

    Raises:
        ExecutionError: An instruction failed, or the limit was reached.
    """
    for number, chain in enumerate(chains):
        index, steps, end = 0, chain.steps, len(chain.steps)
        try:
            if observer is None and not chain.jumps:
                for index, step in enumerate(steps):  # noqa: B007 - read by the handler
                    step()
                continue
            while index < end:
                if limit <= 0:
                    raise ExecutionError("instruction limit reached: an endless loop?")
                limit -= 1
                step = steps[index]
                target = step() if observer is None else observer(number, index, step)
                index = target if type(target) is int else index + 1
        except Exception as error:
            raise _located(error, method, index, chain) from error


def _located(error: Exception, method: str, index: int, chain: BoundChain) -> ExecutionError:
    """Return an ExecutionError that names the failed instruction."""
    text = str(error) if isinstance(error, ExecutionError) else f"{type(error).__name__}: {error}"
    name = chain.instructions[index].name
    kind = type(error) if isinstance(error, ExecutionError) else ExecutionError
    return kind(text, method=method, instruction=index, operator=name)


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
