"""Run bound instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowerdeck.runner.errors import ExecutionError

Step = Callable[[], int | None]
"""Runs one instruction; returns where to go on, or anything but an int for the next one."""

Observer = Callable[[int, int, Step], int | None]
"""Runs the step of an instruction, given its chain and its index, and returns what it returns."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """Facts about one instruction.

    Attributes:
        name: Its operator, such as ``aten::add.out``.
        reads: The values it reads, including those in lists.
        writes: The values it writes, including those in lists.
        overwrites: Those of ``writes`` that are overwritten completely.
        in_place: Those of ``reads`` whose bytes its kernel may overwrite with results.
    """

    name: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    overwrites: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BoundChain:
    """A chain with bound instructions.

    Attributes:
        steps: One function for each instruction.
        instructions: Facts about each.
        follow: Possible successors of each; their number means the end.
        jumps: Whether any instruction jumps.
    """

    steps: tuple[Step, ...]
    instructions: tuple[Instruction, ...]
    follow: tuple[tuple[int, ...], ...]
    jumps: bool


def run_chains(
    chains: Sequence[BoundChain], method: str, limit: int, observer: Observer | None = None
) -> None:
    """Run all chains, one after the other.

    Args:
        chains: The code of a method.
        method: Its name, for messages.
        limit: How many instructions may run in all.
        observer: Runs each instruction, if given.

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
                    raise ExecutionError("the limit of instructions is reached: an endless loop?")
                limit -= 1
                step = steps[index]
                target = step() if observer is None else observer(number, index, step)
                index = target if type(target) is int else index + 1
        except Exception as error:
            raise _located(error, method, index, chain) from error


def _located(error: Exception, method: str, index: int, chain: BoundChain) -> ExecutionError:
    """Return ``error`` as an ExecutionError that names the instruction."""
    text = str(error) if isinstance(error, ExecutionError) else f"{type(error).__name__}: {error}"
    name = chain.instructions[index].name
    kind = type(error) if isinstance(error, ExecutionError) else ExecutionError
    return kind(text, method=method, instruction=index, operator=name)
