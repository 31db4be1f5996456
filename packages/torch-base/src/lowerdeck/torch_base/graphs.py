"""Walks over programs' graphs and graphs in them, copies of them, and what nodes refer to."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.fx import Graph, GraphModule, Node

from lowerdeck.torch_base._torch_private import (
    LazyGraphModule,
    copy_graph,
    reserve_name,
    restore_users,
    with_parts,
    with_plain_sizes,
)
from lowerdeck.torch_base.sources import describe_node

_CONSTANTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_INNER = "export.access_subclass_inner_tensor.default"


def graphs_of(graph_module: GraphModule) -> Iterator[GraphModule]:
    """Yield ``graph_module`` and every graph nested in it that a node refers to, each once.

    Graphs inside earlier delegates are not among them: a delegate is closed.
    """
    seen: set[GraphModule] = set()
    waiting = [graph_module]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        yield current
        nodes = current.graph.find_nodes(op="get_attr")
        attributes = [attribute_of(current, node) for node in reversed(nodes)]
        waiting.extend(value for value in attributes if isinstance(value, GraphModule))


def is_getitem(node: Node) -> bool:
    """Return whether ``node`` takes an element of a value."""
    return node.op == "call_function" and node.target is operator.getitem


def attribute_of(module: torch.nn.Module, reference: Node | str) -> object:
    """Return an attribute of ``module``, or None where there is none.

    Args:
        reference: A node whose target is the attribute's dotted path, or the path itself.
    """
    path = reference if isinstance(reference, str) else str(reference.target)
    value: object = module
    for atom in path.split("."):
        value = getattr(value, atom, None)
    return value


def copy_graph_module(graph_module: GraphModule) -> GraphModule:
    """Return a copy of the graph and all nested graphs; tensors and delegates are shared."""
    memo: dict[int, Any] = {}
    for gm in graphs_of(graph_module):
        for holder in (*gm.parameters(recurse=False), *gm.buffers(recurse=False)):
            memo[id(holder)] = holder
        for node in gm.graph.find_nodes(op="get_attr"):
            value = attribute_of(gm, node)
            if not isinstance(value, GraphModule):
                memo[id(value)] = value
        # Prepared: fx would copy it at three times the cost.
        memo[id(gm.graph)], _ = copy_graph(gm.graph)
    return copy.deepcopy(_lazy(graph_module), memo)


def _lazy(graph_module: GraphModule) -> GraphModule:
    """Return ``graph_module`` as one whose copies generate code at their first call.

    Generating it is a third of the cost of a copy, and most copies are compiled, not run.
    """
    if type(graph_module).__bases__ != (GraphModule,):
        return graph_module
    lazy = LazyGraphModule.__new__(LazyGraphModule)
    lazy.__dict__.update(graph_module.__dict__)
    return lazy


def repair_program(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with what torch 2.13 leaves wrong in right programs repaired.

    Missing ``Node.users`` are restored in place, which is not observable (see
    :func:`restore_users`). The rest is done in a copy: placeholders get the names in the signature
    (fx renames the copy of a node called "input" or "dict"), and sizes that torch has specialized
    (``Dim.AUTO``) but still represents as symbols become numbers. O(edges).

    Returns:
        The program itself, or a copy on the same tensors.
    """
    for module in graphs_of(program.graph_module):
        restore_users(module.graph)
    plain_values = _plain_values(program)
    if not plain_values and not _misnamed_inputs(program):
        return program
    copied = with_parts(program, graph_module=copy_graph_module(program.graph_module))
    for node in copied.graph.nodes if plain_values else ():
        if node.name in plain_values:
            node.meta["val"] = plain_values[node.name]
    for node, name in _misnamed_inputs(copied).items():
        reserve_name(copied.graph, name)
        node.name = name
    return copied


def _plain_values(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return tensors in place of those with specialized sizes, by the name of the node."""
    if not program.range_constraints:
        return {}
    tensors = {
        node.name: node.meta["val"]
        for node in program.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
    }
    plain = {name: with_plain_sizes(tensor) for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in plain.items() if tensor is not tensors[name]}


def _misnamed_inputs(program: ExportedProgram) -> dict[Node, str]:
    """Return the names that the signature has for placeholders of other names."""
    graph = program.graph
    nodes = graph.find_nodes(op="placeholder")
    names = [getattr(spec.arg, "name", None) for spec in program.graph_signature.input_specs]
    if len(nodes) != len(names):
        return {}
    renamed = {
        node: name
        for node, name in zip(nodes, names, strict=True)
        if isinstance(name, str) and name != node.name
    }
    other_names = {node.name for node in graph.nodes if node not in renamed} if renamed else set()
    if len({*renamed.values()} - other_names) < len(renamed):
        return {}  # A pass renamed them on purpose.
    return renamed


def renamed_outputs(signature: ExportGraphSignature, graph: Graph) -> ExportGraphSignature:
    """Return a signature like ``signature`` whose outputs have the names of returned nodes.

    Args:
        signature: Of the graph, before what it returns was replaced by others of its kind.
        graph: The outermost graph of a program.
    """
    values: Any = graph.output_node().args[0]
    outputs: list[Any] = [
        replace(spec, arg=replace(spec.arg, name=value.name)) if isinstance(value, Node) else spec
        for spec, value in zip(signature.output_specs, values, strict=True)
    ]
    return ExportGraphSignature(list(signature.input_specs), outputs)


def changed_constant(program: ExportedProgram) -> str | None:
    """Describe the first constant of a program that does not fit its graph; None if all fit.

    A graph is traced for one shape and dtype of each constant. Another tensor in ``state_dict`` or
    ``constants`` would be read as if it were that, past its end or in the wrong type.

    Args:
        program: Any program. Of subclasses of tensors, the tensors that they are made of are
            looked at, as far as the graph names them.

    Returns:
        A sentence without its full stop, with the constant's name and who reads it.

    Example:
        >>> program = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
        >>> changed_constant(program)
        >>> program.state_dict["bias"] = torch.zeros(2)
        >>> changed_constant(program)[:64]
        "found [2] of torch.float32 for 'bias', which aten.linear.default"
    """
    state, constants = program.state_dict, program.constants
    targets = {
        getattr(spec.arg, "name", ""): str(spec.target)
        for spec in program.graph_signature.input_specs
        if spec.kind in _CONSTANTS
    }
    holders: dict[object, tuple[str, object]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in targets:
            name = targets[node.name]
            tensor = state.get(name, constants.get(name))
        elif node.op == "call_function" and str(node.target) == _INNER and node.args[0] in holders:
            (outer, holder), part = holders[node.args[0]], str(node.args[1])
            name, tensor = f"{outer}.{part}", getattr(holder, part, None)
        else:
            continue
        holders[node] = name, tensor
        exported = node.meta.get("val")
        if not isinstance(tensor, torch.Tensor) or not isinstance(exported, torch.Tensor):
            continue
        # Comparing symbolic sizes would add a guard.
        is_static = all(isinstance(size, int) for size in exported.shape)
        if is_static and (tensor.shape, tensor.dtype) != (exported.shape, exported.dtype):
            reader = next(iter(node.users), None)
            who = f", which {describe_node(reader)} reads" if reader is not None else ""
            return (
                f"found {list(tensor.shape)} of {tensor.dtype} for {name!r}{who}; expected "
                f"{list(exported.shape)} of {exported.dtype}, as exported"
            )
    return None
