"""The outermost module of an unflattened program."""

from __future__ import annotations

from typing import Any

from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Node

from lowerdeck.unflatten.call_signature import FlatArgsAdapter
from lowerdeck.unflatten.modules.module import GeneratedModule
from lowerdeck.unflatten.swaps import SwapTable, swap_table


class UnflattenedModule(GeneratedModule):
    """An exported program as a module with eager's hierarchy; returned by ``unflatten``.

    Attributes:
        graph_signature: The meaning of the program's inputs and outputs.
        module_call_graph: The program's modules and recorded signatures.
        range_constraints: The range of each symbolic size.
        flat_args_adapter: Converts arguments of another structure into the exported one.
        meta: A copy of the metadata of the exported graph module.
    """

    graph_signature: ExportGraphSignature
    module_call_graph: list[Any]
    range_constraints: dict[Any, Any]
    flat_args_adapter: FlatArgsAdapter | None
    meta: dict[str, Any]

    @property
    def input_placeholders(self) -> list[Node]:
        """The placeholders of the graph, one for each leaf of the arguments."""
        return list(GeneratedModule.graph.__get__(self).find_nodes(op="placeholder"))

    def swappable(self) -> SwapTable:
        """Return which modules can be replaced and called alone, and why others cannot.

        Example:
            >>> import torch
            >>> from lowerdeck.unflatten import export_preserving, unflatten
            >>> eager = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
            >>> print(unflatten(export_preserving(eager, (torch.ones(1, 2),))).swappable())
            0  replace  call
            1  replace  call
        """
        return swap_table(self)
