"""Iterate over a program's inputs, outputs and nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from lowerdeck.torch_base import executorch_call_delegate, graphs_of, is_getitem, pytree

STATE_MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
MUTATIONS = (*STATE_MUTATIONS, OutputKind.USER_INPUT_MUTATION)


def nodes_of(graph_module: GraphModule) -> Iterator[Node]:
    """Yield the nodes of a graph, then those of the graphs nested in it."""
    for gm in graphs_of(graph_module):
        yield from gm.graph.nodes


def inputs_of(program: ExportedProgram) -> Iterator[tuple[Node, InputSpec]]:
    """Yield the inputs of a program: placeholders with their specs, in order."""
    placeholders = program.graph.find_nodes(op="placeholder")
    return zip(placeholders, program.graph_signature.input_specs, strict=True)


def user_inputs(program: ExportedProgram) -> list[Node]:
    """Return the placeholders of user inputs, in order."""
    return [node for node, spec in inputs_of(program) if spec.kind == InputKind.USER_INPUT]


def outputs_of(program: ExportedProgram) -> Iterator[tuple[Any, OutputSpec]]:
    """Yield the outputs of a program: nodes or constants with their specs, in order."""
    values: Any = program.graph.output_node().args[0]
    return zip(values, program.graph_signature.output_specs, strict=True)


def new_values(program: ExportedProgram) -> dict[str, Any]:
    """Return the new values of the parameters and buffers that a program changes, by name."""
    return {
        spec.target: value
        for value, spec in outputs_of(program)
        if spec.kind in STATE_MUTATIONS and spec.target is not None
    }


def replace_input(user: Node, node: Node, value: Any) -> None:
    """Replace an input of a node by any argument, such as a number or a list of nodes."""

    def replaced(node_: Node) -> Any:
        return value if node_ is node else node_

    user.args, user.kwargs = map_arg((user.args, user.kwargs), replaced)


def value_of(output: object) -> object:
    """Return the value of a graph output: the fake value of a node, or the constant."""
    return output.meta.get("val") if isinstance(output, Node) else output


def computing_nodes(graph_module: GraphModule) -> Iterator[Node]:
    """Yield the nodes that compute tensors outside of delegates, also those of nested graphs.

    Calls of delegates, getitems, assertions and sizes are excluded.
    """
    for node in nodes_of(graph_module):
        computes = node.op == "call_function" and not is_getitem(node)
        if computes and node.target is not executorch_call_delegate and computes_tensor(node):
            yield node


def computes_tensor(node: Node) -> bool:
    """Return whether a call has a tensor as result, unlike an assertion or a size.

    A call without metadata counts as a call that computes a tensor.
    """
    values = pytree.tree_leaves(node.meta["val"]) if "val" in node.meta else [torch.Tensor()]
    return any(isinstance(value, torch.Tensor) for value in values)
