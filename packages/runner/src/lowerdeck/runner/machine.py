"""Runs bound instructions: straight through, or with jumps under a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowerdeck.runner.binding import Step
from lowerdeck.runner.errors import ExecutionError


@dataclass(frozen=True, slots=True)
class BoundChain:
    """A chain whose instructions are bound.

    Attributes:
        steps: One function for each instruction.
        names: What each instruction calls, for messages and profiles.
        jumps: Whether any instruction jumps.
    """

    steps: tuple[Step, ...]
    names: tuple[str, ...]
    jumps: bool


def run_chains(chains: Sequence[BoundChain], method: str, limit: int) -> None:
    """Run all chains, one after the other.

    Args:
        chains: The code of a method.
        method: Its name, for messages.
        limit: How many instructions may run in all.

    Raises:
        ExecutionError: An instruction failed, or the limit was reached.
    """
    for chain in chains:
        index = -1
        try:
            if not chain.jumps:
                for index, step in enumerate(chain.steps):  # noqa: B007 - told by the handler
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
            raise located(error, method, index, chain) from error


def located(error: Exception, method: str, index: int, chain: BoundChain) -> ExecutionError:
    """Return ``error`` as an ExecutionError that tells where it happened."""
    text = str(error) if isinstance(error, ExecutionError) else f"{type(error).__name__}: {error}"
    name = chain.names[index] if 0 <= index < len(chain.names) else "?"
    kind = type(error) if isinstance(error, ExecutionError) else ExecutionError
    return kind(text, method=method, instruction=index, operator=name)
