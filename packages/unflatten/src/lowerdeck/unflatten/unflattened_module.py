"""The outermost module of an unflattened program."""

from __future__ import annotations

from typing import Any

from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Node, Proxy

from lowerdeck.unflatten._torch_private import pytree
from lowerdeck.unflatten.errors import InputStructureError
from lowerdeck.unflatten.flat_args import FlatArgsAdapter
from lowerdeck.unflatten.generated_module import PRIVATE, GeneratedModule
from lowerdeck.unflatten.readable import print_readable, tree_summary
from lowerdeck.unflatten.signature import CallSignature


class UnflattenedModule(GeneratedModule):
    """An exported program as a module with eager's hierarchy; made by ``unflatten``.

    Attributes:
        graph_signature: What the program's inputs and outputs stood for.
        module_call_graph: The program's modules and preserved signatures.
        range_constraints: The range of each symbolic size.
        flat_args_adapter: What turns arguments of another structure into the exported ones.
        check_input_constraints: Whether calls check shapes and constants of their arguments.
        meta: A copy of the metadata of the exported graph module.
    """

    graph_signature: ExportGraphSignature
    module_call_graph: list[Any]
    range_constraints: dict[Any, Any]
    flat_args_adapter: FlatArgsAdapter | None
    check_input_constraints: bool
    meta: dict[str, Any]

    @property
    def input_placeholders(self) -> list[Node]:
        """The placeholders of the graph, one for each leaf of the arguments."""
        return list(self.graph.find_nodes(op="placeholder"))

    def _flatten_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the leaves of a call, through the adapter where the structure is another one."""
        signature: CallSignature = self.__dict__[PRIVATE].signature
        expected = signature.in_spec
        if isinstance(args, Proxy):
            raise InputStructureError(
                "A symbolic trace gives all arguments of this module as one Proxy; found no way "
                "to tell how many they are. Give concrete_args as a tuple with torch.fx.PH for "
                "each."
            )
        names = expected.child(1).context
        if kwargs and set(kwargs) == set(names):
            kwargs = {name: kwargs[name] for name in names}
        leaves, found = pytree.tree_flatten((args, kwargs))
        if found == expected:
            return leaves
        adapter = self.flat_args_adapter
        if adapter is None:
            raise InputStructureError(
                "The arguments have another structure than the program was exported with: "
                f"found {found}, "
                f"expected {expected}. Pass the exported structure, or give unflatten a "
                "flat_args_adapter."
            )
        leaves = adapter.adapt(
            target_spec=expected,
            input_spec=found,
            input_args=leaves,
            metadata=self.meta,
            obj=args,
        )
        if len(leaves) != expected.num_leaves:
            raise InputStructureError(
                f"{type(adapter).__name__}.adapt returned {len(leaves)} arguments; expected "
                f"{expected.num_leaves}, one for each leaf of {expected}."
            )
        return leaves

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

    def tree_summary(self) -> str:
        """Return one line for each module: its name, eager's type and the size of its state."""
        return tree_summary(self)
