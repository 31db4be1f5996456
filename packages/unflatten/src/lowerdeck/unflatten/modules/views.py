"""The ``graph_module`` of a generated module, and its printed code."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from textwrap import indent
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from lowerdeck.unflatten._torch_private import share_children_and_state
from lowerdeck.unflatten.attributes import PRIVATE
from lowerdeck.unflatten.call_signature import is_name, one_line

NO_CODE = "pass\n"
"""The code of a module that computes nothing itself."""


class GraphView(GraphModule):
    """A module's graph with the module's own children and state, called with flat values."""

    def __init__(
        self,
        owner: torch.nn.Module,
        graph: Graph,
        attributes: Mapping[str, torch.nn.Module],
        recompiled: Callable[[torch.nn.Module, GraphView], None],
    ) -> None:
        """Create a view.

        Args:
            owner: The module; it is not kept alive.
            graph: Its graph.
            attributes: Graph modules for operators such as ``cond``.
            recompiled: Called with the owner and this view when the graph was compiled again.
        """
        super().__init__({}, Graph(), class_name="GraphModule")
        share_children_and_state(self, owner)
        names = {str(node.target) for node in graph.find_nodes(op="get_attr")}
        self.__dict__.update(
            (name, owner.__dict__[name]) for name in names & owner.__dict__.keys()
        )
        self.__dict__.update(attributes)
        self.graph = graph
        self.__dict__["_followed"] = (weakref.ref(owner), recompiled)

    def recompile(self) -> Any:
        """Generate the code of the graph again, here and in the module, after it was edited."""
        code = super().recompile()
        reference, recompiled = self.__dict__.get("_followed", (lambda: None, None))
        owner = reference()
        if owner is not None and recompiled is not None:
            recompiled(owner, self)
        return code

    def _plain(self) -> GraphModule:
        return GraphModule(self, self.graph)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphModule:
        return copy.deepcopy(self._plain(), memo)

    def __reduce__(self) -> Any:
        return self._plain().__reduce__()


def print_readable(module: torch.nn.Module, print_output: bool) -> str:
    """Return the code of ``module`` and of every module below it, as classes.

    Args:
        module: The outermost module.
        print_output: Whether to also print the text.
    """
    parts: list[str] = []
    for path, inner in module.named_modules():
        type_name = _type_of(inner)
        name = type_name.rpartition(".")[2]
        shown = name if is_name(name) else "Module"
        parts.append(
            f"class {shown}(torch.nn.Module):  # {one_line(path or '(root)')}: {type_name}"
        )
        body = inner.__dict__.get(PRIVATE)
        parts.append(indent(body.text() if body is not None else NO_CODE, "    "))
    text = "\n".join(parts)
    if print_output:
        print(text)
    return text


def _type_of(module: torch.nn.Module) -> str:
    body = module.__dict__.get(PRIVATE)
    return one_line(str((body and body.type_name) or type(module).__name__))
