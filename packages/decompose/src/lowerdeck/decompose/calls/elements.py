"""Templates of single results of a call, without what only other results need.

A view that is one of several, such as those of ``unbind``, is regenerated after each write: what
gives all of them would be copied as often, which grows with the square of how many there are.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch.fx import Node

from lowerdeck.decompose.calls.template import Result, Step, Template
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
        for position, step in enumerate(template.steps):
            self._at[step.node] = position
            if isinstance(step, Step) and isinstance(step.facts, SYMBOLS):
                self._sizes.add(position)
        self._made: dict[int, Template] = {}

    def only(self, index: int) -> Template:
        """Return the template of one result.

        Args:
            index: Which.
        """
        if index not in self._made:
            self._made[index] = self._only(self.template.results[index])
        return self._made[index]

    def _only(self, result: Any) -> Template:
        needed: set[int] = set()
        left = [self.template.steps[position].node for position in self._sizes]
        if isinstance(result, Result):
            left += [result.node, result.root]
        while left:
            position = self._at.get(node := left.pop())
            if position is not None and position not in needed:
                needed.add(position)
                left += node.all_input_nodes
        steps = [self.template.steps[position] for position in sorted(needed)]
        wanted: dict[Any, list[Any]] = {}
        for step in steps:
            if step.node.target is operator.getitem:
                wanted.setdefault(step.node.args[0], []).append(step.node.args[1])
        with_wanted = tuple(
            replace(step, wanted=indices[0])
            if isinstance(step, Step) and len(indices := wanted.get(step.node, [])) == 1
            else step
            for step in steps
        )
        return replace(self.template, steps=with_wanted, results=result)
