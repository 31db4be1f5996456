"""Programs as passes leave them: functions of graph modules, or of whole programs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
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
    for each in passes:
        if of_exirs(each):
            copied = changed_as_in_exir(copied, partial(_after, each=each))
        else:
            copied = _after(in_torch_operators(copied), each)
    return copied


def of_exirs(each: Any) -> bool:
    """Return whether a pass or partitioner is of a class of ExecuTorch's: it knows Edge only.

    Args:
        each: The pass or partitioner.
    """
    if isinstance(each, PassManager) and any(map(of_exirs, each.passes)):
        return True
    kinds = (each,) if inspect.isroutine(each) else type(each).__mro__
    return any(map(is_exirs, kinds))


def _after(program: ExportedProgram, each: Any) -> ExportedProgram:
    name = getattr(each, "__name__", type(each).__name__)
    if not callable(each) or isinstance(each, type):
        raise TransformError(
            f"found {each!r} as a pass, expected what can be called with a GraphModule, such as "
            "an object of a subclass of torch.fx.passes.infra.pass_base.PassBase"
        )
    takes_program = _takes_program(each)
    found = each(program if takes_program else program.graph_module)
    if isinstance(found, ExportedProgram):
        return found
    whole = getattr(found, "exported_program", None)
    if isinstance(whole, ExportedProgram):
        return whole
    inner = getattr(found, "graph_module", found)
    if inner is None:
        inner = program.graph_module
    if not isinstance(inner, GraphModule):
        raise TransformError(
            f"pass {name} returned a {type(found).__name__}, expected a GraphModule, a "
            "PassResult of one, or None where it changed what it was given"
        )
    inner.recompile()
    signature = _signature(program.graph_signature, inner, name)
    return with_parts(program, graph_module=inner, graph_signature=signature)


def _takes_program(each: Any) -> bool:
    """Return whether a pass says of its first parameter that it is a program."""
    called = each if inspect.isroutine(each) else getattr(each, "call", each.__call__)
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        return False
    if not parameters:
        return False
    said = parameters[0].annotation
    text = said if isinstance(said, str) else getattr(said, "__name__", "")
    return text.rpartition(".")[2] == "ExportedProgram"


def _signature(
    signature: ExportGraphSignature, graph_module: GraphModule, name: str
) -> ExportGraphSignature:
    """Return what describes a graph whose inputs and outputs a pass may have called otherwise."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    returned = graph_module.graph.output_node().args[0]
    outputs = returned if isinstance(returned, list | tuple) else (returned,)
    for word, found, specs in (
        ("takes", placeholders, signature.input_specs),
        ("returns", outputs, signature.output_specs),
    ):
        if len(found) != len(specs):
            raise TransformError(
                f"after pass {name} the graph {word} {len(found)} values, expected the "
                f"{len(specs)} of the program's signature: a pass that changes them must return "
                "an ExportedProgram"
            )
    renamed: dict[str, str] = {}
    inputs: list[InputSpec] = []
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        renamed[getattr(spec.arg, "name", "")] = node.name
        inputs.append(replace(spec, arg=_called(spec.arg, node)))
    made: list[OutputSpec] = []
    for value, said in zip(outputs, signature.output_specs, strict=True):
        target = renamed.get(said.target, said.target) if said.target else said.target
        made.append(replace(said, arg=_called(said.arg, value), target=target))
    return ExportGraphSignature(inputs, made)


def _called(argument: Any, value: Any) -> Any:
    """Return the argument of a spec under the name of a value in the graph."""
    if isinstance(value, Node) and not isinstance(argument, ConstantArgument):
        return replace(argument, name=value.name)
    return argument


def is_passes(given: object) -> bool:
    """Return whether something is several passes, and not one that holds several.

    Args:
        given: What a caller gave.
    """
    return isinstance(given, list | tuple) and not isinstance(given, torch.nn.Module)
