"""Templates of single results of a call, without what only other results need.

A view that is one of several, such as those of ``unbind``, is regenerated after each write: what
gives all of them would be copied as often, which grows with the square of how many there are.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.fx import Node

from lowerdeck.decompose.calls.template import Passed, Result, Step, Template
from lowerdeck.torch_base import SYMBOLS


class Elements:
    """The templates of single results of a call, each made in the time of what it computes.

    Args:
        template: Of the call, which returns a sequence and writes nothing.

    Attributes:
        template: Likewise.
    """

    def __init__(self, template: Template) -> None:
        self.template: Template = template
        self._at: dict[Node, int] = {}
        # A view may be told by a size that another result is computed with.
        self._sizes: set[int] = set()
        self._named: dict[str, list[int]] = {}
        for position, step in enumerate(template.steps):
            if not isinstance(step, Passed):
                self._at[step.node] = position
            if isinstance(step, Step) and isinstance(step.facts, SYMBOLS):
                self._sizes.add(position)
            if step.name is not None:
                self._named.setdefault(step.name, []).append(position)
        self._made: dict[int, Template] = {}

    @property
    def names(self) -> tuple[Passed, ...]:
        """What names all of them take."""
        return tuple(self._between(0, len(self.template.steps)))

    def only(self, index: int) -> Template:
        """Return the template of one result, whose names are those that it has among all.

        Args:
            index: Which.
        """
        made = self._made.get(index)
        if made is None:
            made = self._made[index] = self._only(self.template.results[index])
        return made

    def _only(self, result: Any) -> Template:
        needed: set[int] = set()
        left = [self.template.steps[position].node for position in self._sizes]  # type: ignore[union-attr]
        if isinstance(result, Result):
            left += [result.node, result.root]
        while left:
            position = self._at.get(node := left.pop())
            if position is not None and position not in needed:
                needed.add(position)
                left += node.all_input_nodes
        steps: list[Any] = []
        last = 0
        for position in sorted(needed):
            steps += [*self._between(last, position), self.template.steps[position]]
            last = position + 1
        steps += self._between(last, len(self.template.steps))
        wanted: dict[Node, list[Any]] = {}
        for step in steps:
            if not isinstance(step, Passed) and step.node.target is operator.getitem:
                wanted.setdefault(step.node.args[0], []).append(step.node.args[1])
        told = tuple(
            replace(step, wanted=indices[0])
            if isinstance(step, Step) and len(indices := wanted.get(step.node, [])) == 1
            else step
            for step in steps
        )
        return replace(self.template, steps=told, results=result)

    def _between(self, first: int, past: int) -> Iterator[Passed]:
        """Yield the names of the steps from one position to before another."""
        for name, positions in self._named.items():
            count = bisect_left(positions, past) - bisect_left(positions, first)
            if count:
                yield Passed(name, count)
