"""Run bound instructions: straight through, with jumps under a limit, or under observation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lowerdeck.runner.errors import ExecutionError

Step = Callable[[], int | None]
"""Runs one instruction; returns where to go on, or anything but an int for the next one."""

Observer = Callable[[int, int, Step], int | None]
"""Runs the step of an instruction, given its chain and its index, and returns what it returns."""


@runtime_checkable
class StepInTwoParts(Protocol):
    """A step whose results may be observed before it ends, but not after."""

    @property
    def body(self) -> Step:
        """Return the function that runs the instruction."""
        ...

    def finish(self) -> None:
        """Run the rest of the step, after the results were observed."""
        ...


@dataclass(frozen=True, slots=True)
class Instruction:
    """Facts about one instruction.

    Attributes:
        name: Its operator, such as ``aten::add.out``.
        reads: The values it reads, including those in lists.
        writes: The values it writes, including those in lists.
        overwrites: Those of ``writes`` that are overwritten completely.
        in_place: Those of ``reads`` whose bytes its kernel may overwrite with results.
        renames: For a move or a view: the value whose bytes are used, and the value that uses
            them from then on; nothing is written.
    """

    name: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    overwrites: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()
    renames: tuple[int, int] | None = None


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


def run_chains(chains: Sequence[BoundChain], method: str, limit: int) -> None:
    """Run all chains, one after the other.

    Args:
        chains: The code of a method.
        method: Its name, for messages.
        limit: How many instructions may run in all, where there are jumps.

    Raises:
        ExecutionError: An instruction failed, or the limit was reached.
    """
    for chain in chains:
        index = -1
        try:
            if not chain.jumps:
                for index, step in enumerate(chain.steps):  # noqa: B007 - read by the handler
                    step()
                continue
            index, steps, end = 0, chain.steps, len(chain.steps)
            while index < end:
                if limit <= 0:
                    raise ExecutionError("the limit of instructions is reached: an endless loop?")
                limit -= 1
                target = steps[index]()
                index = target if type(target) is int else index + 1
        except Exception as error:
            raise _located(error, method, index, chain) from error


def run_observed(
    chains: Sequence[BoundChain], method: str, limit: int, observer: Observer
) -> None:
    """Run all chains with ``observer`` around every instruction.

    Args:
        chains: The code of a method.
        method: Its name, for messages.
        limit: How many instructions may run in all.

    Raises:
        ExecutionError: An instruction failed, or the limit was reached.
    """
    for number, chain in enumerate(chains):
        index = 0
        try:
            while index < len(chain.steps):
                if limit <= 0:
                    raise ExecutionError("the limit of instructions is reached: an endless loop?")
                limit -= 1
                target = observer(number, index, chain.steps[index])
                index = target if type(target) is int else index + 1
        except Exception as error:
            raise _located(error, method, index, chain) from error


def _located(error: Exception, method: str, index: int, chain: BoundChain) -> ExecutionError:
    """Return ``error`` as an ExecutionError that names the instruction."""
    text = str(error) if isinstance(error, ExecutionError) else f"{type(error).__name__}: {error}"
    exists = 0 <= index < len(chain.instructions)
    name = chain.instructions[index].name if exists else "?"
    kind = type(error) if isinstance(error, ExecutionError) else ExecutionError
    return kind(text, method=method, instruction=index, operator=name)
