"""Calls of higher-order operators: of graphs in graphs."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from lowerdeck.decompose.errors import WholeProgramNeeded
from lowerdeck.torch_base import attribute_of


class Regions:
    """What calls of higher-order operators become in the graph of one module."""

    def attribute(self, gm: GraphModule, node: Node) -> Any:
        """Return what a get_attr node is.

        Args:
            gm: The module that holds it.
            node: The node.
        """
        held = attribute_of(gm, node)
        if isinstance(held, GraphModule):
            return held
        raise WholeProgramNeeded(f"{node.name!r} reads an attribute of type {type(held).__name__}")

    def call(self, walk: Any, gm: GraphModule, node: Node, args: Any, kwargs: Any) -> Any:
        """Return what a call of a higher-order operator has become.

        Args:
            walk: The walk that it is met in.
            gm: The module of the graph.
            node: The call.
            args: Its arguments, as values.
            kwargs: Its keywords.
        """
        raise WholeProgramNeeded(f"{node.name!r} calls the higher-order operator {node.target}")
