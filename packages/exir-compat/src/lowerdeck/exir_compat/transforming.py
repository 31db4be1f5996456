"""Run passes on a program, and update its signature."""

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

from lowerdeck.exir_compat._executorch import is_exirs
from lowerdeck.exir_compat.errors import TransformError
from lowerdeck.lowered_module import changed_as_in_exir, in_torch_operators
from lowerdeck.torch_base import copy_graph_module, with_parts

Pass = Callable[..., Any]
"""Takes a graph module, or a program where it says so, and returns what it became.

A graph module comes back as itself, in the ``graph_module`` of a ``PassResult``, or, where it was
changed in place, as None; a program as itself or in an ``exported_program``.
"""


def transformed(program: ExportedProgram, passes: Iterable[Pass]) -> ExportedProgram:
    """Return a program after passes, one after the other.

    Args:
        program: Any program; neither it nor its graph is changed. Weights are shared.

    Raises:
        TransformError: A pass is none, returned something else, or changed what the program
            takes or returns.
    """
    copied = with_parts(program, graph_module=copy_graph_module(program.graph_module))
    for transform in passes:
        if of_exirs(transform):
            copied = changed_as_in_exir(copied, partial(_after, transform=transform))
        else:
            copied = _after(in_torch_operators(copied), transform)
    return copied


def of_exirs(transform: Any) -> bool:
    """Return whether a pass or partitioner is of a class of ExecuTorch's, for Edge programs."""
    if isinstance(transform, PassManager) and any(map(of_exirs, transform.passes)):
        return True
    kinds = (transform,) if inspect.isroutine(transform) else type(transform).__mro__
    return any(map(is_exirs, kinds))


def _after(program: ExportedProgram, transform: Any) -> ExportedProgram:
    name = getattr(transform, "__name__", type(transform).__name__)
    result = transform(program if _takes_program(transform) else program.graph_module)
    if isinstance(result, ExportedProgram):
        return result
    whole = getattr(result, "exported_program", None)
    if isinstance(whole, ExportedProgram):
        return whole
    inner = getattr(result, "graph_module", result)
    if inner is None:
        inner = program.graph_module
    if not isinstance(inner, GraphModule):
        raise TransformError(
            f"pass {name} returned a {type(result).__name__}, expected a GraphModule, a "
            "PassResult of one, or None where it changed what it was given"
        )
    inner.recompile()
    signature = _signature(program.graph_signature, inner, name)
    return with_parts(program, graph_module=inner, graph_signature=signature)


def _takes_program(transform: Any) -> bool:
    """Return whether the annotation of a pass's first parameter is that of a program."""
    try:
        parameters = inspect.signature(getattr(transform, "call", transform)).parameters.values()
    except (TypeError, ValueError):
        return False
    return any("ExportedProgram" in str(one.annotation) for one in list(parameters)[:1])


def _signature(
    signature: ExportGraphSignature, graph_module: GraphModule, name: str
) -> ExportGraphSignature:
    """Return what describes a graph whose inputs and outputs a pass may have called otherwise."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    returned = graph_module.graph.output_node().args[0]
    outputs = returned if isinstance(returned, list | tuple) else (returned,)
    counts = len(placeholders), len(outputs)
    expected = len(signature.input_specs), len(signature.output_specs)
    if counts != expected:
        raise TransformError(
            f"after pass {name} the graph takes and returns {counts} values, expected the "
            f"{expected} of the program's signature: a pass that changes them must return an "
            "ExportedProgram"
        )
    renamed: dict[str, str] = {}
    inputs: list[InputSpec] = []
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        renamed[getattr(spec.arg, "name", "")] = node.name
        inputs.append(replace(spec, arg=_called(spec.arg, node)))
    output_specs: list[OutputSpec] = []
    for value, said in zip(outputs, signature.output_specs, strict=True):
        target = renamed.get(said.target, said.target) if said.target else said.target
        output_specs.append(replace(said, arg=_called(said.arg, value), target=target))
    return ExportGraphSignature(inputs, output_specs)


def _called(argument: Any, value: Any) -> Any:
    """Return the argument of a spec under the name of a value in the graph."""
    if isinstance(value, Node) and not isinstance(argument, ConstantArgument):
        return replace(argument, name=value.name)
    return argument
