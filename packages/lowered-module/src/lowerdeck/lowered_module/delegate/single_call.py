"""The program that does nothing but call one delegate."""

from __future__ import annotations

import operator
from typing import Any

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

from lowerdeck.lowered_module.delegate.calling_convention import CallingConvention
from lowerdeck.lowered_module.program.debug_handles import HANDLE
from lowerdeck.lowered_module.program.graphs import value_of
from lowerdeck.lowered_module.program.signature import argument_of
from lowerdeck.torch_base import executorch_call_delegate


def single_call_program(
    delegate: torch.nn.Module,
    inner: ExportedProgram,
    convention: CallingConvention | None,
) -> ExportedProgram:
    """Return a program whose inputs go to ``delegate`` and whose outputs come from it.

    Args:
        delegate: The delegate to call. What it owns is no part of the program.
        inner: The program that the delegate stands for, flat in and out.
        convention: How the program is called; with flat arguments if None.
    """
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
    values = inner.graph.output_node().args[0]
    returned = [
        value
        for value, spec in zip(values, signature.output_specs, strict=True)
        if spec.kind == OutputKind.USER_OUTPUT
    ]
    call = graph.call_function(
        executorch_call_delegate, (graph.get_attr("lowered_module_0"), *arguments)
    )
    call.meta = {"val": [value_of(output) for output in returned], HANDLE: 1}
    parts = [_picked(call, index, output) for index, output in enumerate(returned)]
    mutated = () if convention is None else convention.mutated
    output_specs = [
        OutputSpec(OutputKind.USER_INPUT_MUTATION, argument_of(part), arguments[index].name)
        for part, index in zip(parts, mutated, strict=False)
    ]
    results: list[Any] = parts[len(mutated) :]
    if convention is not None:
        results = convention.with_constants(results)
    output_specs += [
        OutputSpec(OutputKind.USER_OUTPUT, argument_of(result), None) for result in results
    ]
    graph.output((*parts[: len(mutated)], *results))
    root = torch.nn.Module()
    root.add_module("lowered_module_0", delegate)
    return ExportedProgram(
        root=GraphModule(root, graph),
        graph=graph,
        graph_signature=ExportGraphSignature(input_specs, output_specs),
        state_dict={},
        range_constraints=dict(inner.range_constraints),
        module_call_graph=_call_graph(convention, inner),
        constants={},
    )


def _picked(call: Node, index: int, output: object) -> Node:
    part = call.graph.call_function(operator.getitem, (call, index))
    part.meta = {"val": value_of(output)}
    return part


def _call_graph(
    convention: CallingConvention | None, inner: ExportedProgram
) -> list[ModuleCallEntry]:
    if convention is None:
        return list(inner.module_call_graph)
    signature = ModuleCallSignature(
        inputs=[], outputs=[], in_spec=convention.in_spec, out_spec=convention.out_spec
    )
    return [ModuleCallEntry("", signature)]
