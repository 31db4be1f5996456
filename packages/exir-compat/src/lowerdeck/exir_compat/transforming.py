"""Run passes on a program and update its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputSpec,
    OutputSpec,
)
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_manager import PassManager

from lowerdeck.exir_compat._executorch import is_from_executorch
from lowerdeck.exir_compat.errors import TransformError
from lowerdeck.lowered_module import changed_as_in_exir, in_torch_operators
from lowerdeck.torch_base import copy_graph_module, with_parts

Pass = Callable[..., Any]
"""Takes a graph module (or a program, if its parameter is annotated so) and returns the result.

Results may be a graph module, a ``PassResult``, None for in-place changes, a program, or an object
with an ``exported_program``.
"""


def transformed(program: ExportedProgram, passes: Iterable[Pass]) -> ExportedProgram:
    """Return a program transformed by passes, in order.

    Args:
        program: Any program; not changed. Weights are shared.

    Raises:
        TransformError: A pass returned an unsupported result, or changed the number of inputs or
            outputs.
    """
    copied = with_parts(program, graph_module=copy_graph_module(program.graph_module))
    for transform in passes:
        if expects_edge(transform):
            copied = changed_as_in_exir(copied, partial(_after, transform=transform))
        else:
            copied = _after(in_torch_operators(copied), transform)
    return copied


def expects_edge(transform: Any) -> bool:
    """Return whether a pass or partitioner is defined in ExecuTorch, so expects Edge programs."""
    if isinstance(transform, PassManager) and any(map(expects_edge, transform.passes)):
        return True
    kinds = (transform,) if inspect.isroutine(transform) else type(transform).__mro__
    return any(map(is_from_executorch, kinds))


def _after(program: ExportedProgram, transform: Any) -> ExportedProgram:
    name = getattr(transform, "__name__", type(transform).__name__)
    result = transform(program if _takes_program(transform) else program.graph_module)
    if isinstance(result, ExportedProgram):
        return result
    program_result = getattr(result, "exported_program", None)
    if isinstance(program_result, ExportedProgram):
        return program_result
    inner = getattr(result, "graph_module", result)
    if inner is None:
        inner = program.graph_module
    if not isinstance(inner, GraphModule):
        raise TransformError(
            f"pass {name} returned a {type(result).__name__}; expected a GraphModule, an "
            "ExportedProgram, a PassResult, or None after in-place changes"
        )
    inner.recompile()
    signature = _signature(program.graph_signature, inner, name)
    return with_parts(program, graph_module=inner, graph_signature=signature)


def _takes_program(transform: Any) -> bool:
    """Return whether a pass's first parameter is annotated as a program."""
    try:
        parameters = inspect.signature(getattr(transform, "call", transform)).parameters.values()
    except (TypeError, ValueError):
        return False
    return any("ExportedProgram" in str(first.annotation) for first in list(parameters)[:1])


def _signature(
    signature: ExportGraphSignature, graph_module: GraphModule, name: str
) -> ExportGraphSignature:
    """Return the signature with the graph's input and output names."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    returned = graph_module.graph.output_node().args[0]
    outputs = returned if isinstance(returned, list | tuple) else (returned,)
    counts = len(placeholders), len(outputs)
    expected = len(signature.input_specs), len(signature.output_specs)
    if counts != expected:
        raise TransformError(
            f"after pass {name} the graph has {counts} inputs and outputs, but the signature has "
            f"{expected}: a pass that changes their number must return an ExportedProgram"
        )
    renamed: dict[str, str] = {}
    inputs: list[InputSpec] = []
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        renamed[getattr(spec.arg, "name", "")] = node.name
        inputs.append(replace(spec, arg=_with_name_of(spec.arg, node)))
    output_specs: list[OutputSpec] = []
    for value, old in zip(outputs, signature.output_specs, strict=True):
        target = renamed.get(old.target, old.target) if old.target else old.target
        output_specs.append(replace(old, arg=_with_name_of(old.arg, value), target=target))
    return ExportGraphSignature(inputs, output_specs)


def _with_name_of(argument: Any, value: Any) -> Any:
    """Return a spec's argument with the name of a graph value."""
    if isinstance(value, Node) and not isinstance(argument, ConstantArgument):
        return replace(argument, name=value.name)
    return argument
