"""Tensors that decompositions make, or have from outside: they become inputs of the program.

torch's own way fails on them: what ``run_decompositions`` lifts is in no signature.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import islice

import torch
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node


class LiftedConstants:
    """The constants that a graph gets while it is written.

    Args:
        graph: The graph, with its placeholders.
        specs: What these are.
        taken: Names of the program's own tensors.
    """

    def __init__(self, graph: Graph, specs: Sequence[InputSpec], taken: Iterable[str]) -> None:
        self._graph = graph
        self._taken = set(taken)
        self._nodes: dict[int, Node] = {}
        kinds = [spec.kind for spec in specs]
        # The inputs of the user are the last, by which torch knows them.
        self._position = (
            kinds.index(InputKind.USER_INPUT) if InputKind.USER_INPUT in kinds else len(kinds)
        )
        self.tensors: dict[str, torch.Tensor] = {}
        self.specs: list[InputSpec] = []

    def placeholder(self, held: torch.Tensor) -> tuple[Node, bool]:
        """Return the placeholder of a constant, and whether it is new.

        Args:
            held: The constant.
        """
        known = self._nodes.get(id(held))
        if known is not None:
            return known, False
        count = len(self.specs)
        while (target := f"lifted_by_rule_{count}") in self._taken:
            count += 1
        self._taken.add(target)
        following = next(islice(self._graph.nodes, self._position + len(self.specs), None), None)
        with nullcontext() if following is None else self._graph.inserting_before(following):
            made = self._graph.placeholder(f"c_{target}")
        made.target = made.name
        self._nodes[id(held)] = made
        self.tensors[target] = held
        argument = TensorArgument(name=made.name)
        self.specs.append(InputSpec(InputKind.CONSTANT_TENSOR, argument, target))
        return made, True

    def added_to(self, specs: Sequence[InputSpec]) -> list[InputSpec]:
        """Return what all inputs are.

        Args:
            specs: What those of the original program are.
        """
        return [*specs[: self._position], *self.specs, *specs[self._position :]]
