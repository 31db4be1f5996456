"""The program that does nothing but call one delegate."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
)
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from lowerdeck.lowered_module._torch_private import executorch_call_delegate
from lowerdeck.lowered_module.debug_handles import HANDLE
from lowerdeck.lowered_module.signature import argument_of, user_values

if TYPE_CHECKING:
    from lowerdeck.lowered_module.module import LoweredBackendModule


def single_call_program(
    delegate: LoweredBackendModule,
    in_spec: pytree.TreeSpec | None,
    out_spec: pytree.TreeSpec | None,
) -> ExportedProgram:
    """Return a program whose inputs go to ``delegate`` and whose outputs come from it.

    Args:
        delegate: The delegate to call. What it owns is no part of the program.
        in_spec: Structure of the program's arguments, if not flat.
        out_spec: Structure of the program's result, if not flat.
    """
    inner = delegate.original_module
    signature = inner.graph_signature
    graph = Graph()
    arguments: list[Node] = []
    input_specs: list[InputSpec] = []
    sources = inner.graph.find_nodes(op="placeholder")
    for source, spec in zip(sources, signature.input_specs, strict=True):
        if spec.kind != InputKind.USER_INPUT:
            continue
        node = graph.placeholder(source.name)
        node.meta = {"val": source.meta.get("val")}
        arguments.append(node)
        input_specs.append(InputSpec(InputKind.USER_INPUT, argument_of(node), None))
    returned = user_values(inner.graph.output_node().args[0], signature.output_specs)
    call = graph.call_function(
        executorch_call_delegate, (graph.get_attr("lowered_module_0"), *arguments)
    )
    call.meta = {"val": [_value(output) for output in returned], HANDLE: 1}
    results: list[Any] = []
    for index, output in enumerate(returned):
        if not isinstance(output, Node):
            results.append(output)
            continue
        part = graph.call_function(operator.getitem, (call, index))
        part.meta = {"val": output.meta.get("val")}
        results.append(part)
    graph.output(tuple(results))
    root = torch.nn.Module()
    root.add_module("lowered_module_0", delegate)
    flat = inner.module_call_graph[0].signature
    return ExportedProgram(
        root=GraphModule(root, graph),
        graph=graph,
        graph_signature=ExportGraphSignature(
            input_specs,
            [OutputSpec(OutputKind.USER_OUTPUT, argument_of(result), None) for result in results],
        ),
        state_dict={},
        range_constraints=dict(inner.range_constraints),
        module_call_graph=[
            ModuleCallEntry(
                "",
                ModuleCallSignature(
                    inputs=[],
                    outputs=[],
                    in_spec=in_spec or flat.in_spec,
                    out_spec=out_spec or flat.out_spec,
                ),
            )
        ],
        constants={},
    )


def _value(output: object) -> object:
    return output.meta.get("val") if isinstance(output, Node) else output
