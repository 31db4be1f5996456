"""The outermost module of an unflattened program."""

from __future__ import annotations

from typing import Any

from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Node

from lowerdeck.unflatten.calls.carrying import PRIVATE
from lowerdeck.unflatten.calls.flat_args import FlatArgsAdapter
from lowerdeck.unflatten.calls.input_constraints import CHECKS
from lowerdeck.unflatten.modules.generated_module import Body, GeneratedModule
from lowerdeck.unflatten.modules.readable import print_readable, tree_summary
from lowerdeck.unflatten.modules.swap_table import SwapTable, swap_table


class UnflattenedModule(GeneratedModule):
    """An exported program as a module with eager's hierarchy; made by ``unflatten``.

    Attributes:
        graph_signature: What the program's inputs and outputs stood for.
        module_call_graph: The program's modules and preserved signatures.
        range_constraints: The range of each symbolic size.
        flat_args_adapter: What turns arguments of another structure into the exported ones.
        meta: A copy of the metadata of the exported graph module.
    """

    graph_signature: ExportGraphSignature
    module_call_graph: list[Any]
    range_constraints: dict[Any, Any]
    flat_args_adapter: FlatArgsAdapter | None
    meta: dict[str, Any]

    @property
    def check_input_constraints(self) -> bool:
        """Whether calls check shapes, types and constants, here and in all modules below.

        Set to False, they run what the program holds, whatever they are given. What
        ``graph_module`` runs is not switched.
        """
        asked: bool = self.__dict__[CHECKS]
        return asked

    @check_input_constraints.setter
    def check_input_constraints(self, asked: bool) -> None:
        """Switch the checks of this module and of all modules below on or off."""
        self.__dict__[CHECKS] = asked
        for module in self.modules():
            if isinstance(module, GeneratedModule):
                body: Body = module.__dict__[PRIVATE]
                for form in (body, *body.others):
                    form.unchecked = not asked

    @property
    def input_placeholders(self) -> list[Node]:
        """The placeholders of the graph, one for each leaf of the arguments."""
        return list(GeneratedModule.graph.__get__(self).find_nodes(op="placeholder"))

    def print_readable(
        self,
        print_output: bool = True,
        include_stride: bool = False,  # noqa: ARG002
        include_device: bool = False,  # noqa: ARG002
        colored: bool = False,  # noqa: ARG002
    ) -> str:
        """Return the code of the whole tree; print it too unless told otherwise.

        Args:
            print_output: Whether to print.
            include_stride: Accepted for torch's sake; strides are not shown.
            include_device: Accepted for torch's sake; devices are not shown.
            colored: Accepted for torch's sake; the text is plain.
        """
        return print_readable(self, "UnflattenedModule", print_output)

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
        return swap_table(self, self.__dict__["meta"])

    def tree_summary(self) -> str:
        """Return one line for each module: its name, eager's type and the size of its state."""
        return tree_summary(self)
