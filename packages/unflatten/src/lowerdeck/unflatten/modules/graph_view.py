"""The ``graph_module`` of a generated module: its graph as torch's own kind of module."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from lowerdeck.unflatten._torch_private import shares_children_and_state


class GraphView(GraphModule):
    """A module's graph with the module's own children and state, called with flat values.

    It follows the module: a child that is replaced there is replaced here.
    """

    def __init__(
        self,
        owner: torch.nn.Module,
        graph: Graph,
        attributes: Mapping[str, torch.nn.Module],
        changed: Callable[[torch.nn.Module, GraphView], None],
    ) -> None:
        """Make a view.

        Args:
            owner: The module; it is not kept alive.
            graph: Its graph.
            attributes: Graph modules that operators such as ``cond`` take.
            changed: Called with the owner and this view when the graph was compiled again.
        """
        super().__init__({}, Graph(), class_name="GraphModule")
        shares_children_and_state(self, owner)
        own = {str(node.target) for node in graph.find_nodes(op="get_attr")}
        self.__dict__.update((name, owner.__dict__[name]) for name in own & owner.__dict__.keys())
        self.__dict__.update(attributes)
        self.graph = graph
        self.__dict__["_followed"] = (weakref.ref(owner), changed)

    def recompile(self) -> Any:
        """Generate the code of the graph again, here and in the module, after it was edited."""
        code = super().recompile()
        found, changed = self.__dict__.get("_followed", (_nobody, None))
        owner = found()
        if owner is not None and changed is not None:
            changed(owner, self)
        return code

    def _plain(self) -> GraphModule:
        return GraphModule(self, self.graph)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphModule:
        return copy.deepcopy(self._plain(), memo)

    def __reduce__(self) -> Any:
        return self._plain().__reduce__()


def _nobody() -> None:
    return None
