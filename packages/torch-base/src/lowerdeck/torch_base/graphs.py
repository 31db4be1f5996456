"""Traversal, copies and repairs of programs' graphs and nested graphs."""

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
_SUBCLASS_ACCESS = "export.access_subclass_inner_tensor.default"


def graphs_of(graph_module: GraphModule) -> Iterator[GraphModule]:
    """Yield ``graph_module`` and all nested graphs referenced by nodes, each once.

    Graphs in delegates are not included.
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
    """Return whether ``node`` is a getitem call."""
    return node.op == "call_function" and node.target is operator.getitem


def attribute_of(module: torch.nn.Module, reference: Node | str) -> object:
    """Return an attribute of ``module``, or None if missing.

    Args:
        reference: A get_attr node, or a dotted path.
    """
    path = reference if isinstance(reference, str) else str(reference.target)
    value: object = module
    for atom in path.split("."):
        value = getattr(value, atom, None)
    return value


def copy_graph_module(graph_module: GraphModule) -> GraphModule:
    """Return a copy with copies of all nested graphs; tensors and delegates are shared."""
    memo: dict[int, Any] = {}
    for gm in graphs_of(graph_module):
        for holder in (*gm.parameters(recurse=False), *gm.buffers(recurse=False)):
            memo[id(holder)] = holder
        for node in gm.graph.find_nodes(op="get_attr"):
            value = attribute_of(gm, node)
            if not isinstance(value, GraphModule):
                memo[id(value)] = value
        # Precopied, because fx is slower.
        memo[id(gm.graph)], _ = copy_graph(gm.graph)
    return copy.deepcopy(_lazy(graph_module), memo)


def _lazy(graph_module: GraphModule) -> GraphModule:
    """Return ``graph_module`` as a ``LazyGraphModule``, so that copies generate code lazily."""
    if type(graph_module).__bases__ != (GraphModule,):
        return graph_module
    lazy = LazyGraphModule.__new__(LazyGraphModule)
    lazy.__dict__.update(graph_module.__dict__)
    return lazy


def repair_program(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with defects of torch 2.13's export repaired.

    Missing ``Node.users`` are restored in place (see :func:`restore_users`). Other repairs are
    made in a copy: placeholders get their signature names (fx renames copies of nodes called
    "input" or "dict"), and specialized sizes (``Dim.AUTO``) that are still symbols become ints.

    Returns:
        The program itself, or a copy that shares its tensors.
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
    """Return replacements for tensors with specialized symbols, by node name."""
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
    """Return the name in the signature of each placeholder that has another name."""
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
        return {}  # Intentionally renamed by a pass.
    return renamed


def renamed_outputs(signature: ExportGraphSignature, graph: Graph) -> ExportGraphSignature:
    """Return a copy of ``signature`` with the names of the graph's output nodes.

    Args:
        signature: Signature before output nodes were replaced.
        graph: Root graph of a program.
    """
    values: Any = graph.output_node().args[0]
    outputs: list[Any] = [
        replace(spec, arg=replace(spec.arg, name=value.name)) if isinstance(value, Node) else spec
        for spec, value in zip(signature.output_specs, values, strict=True)
    ]
    return ExportGraphSignature(list(signature.input_specs), outputs)


def changed_constant(program: ExportedProgram) -> str | None:
    """Return a description of the first constant that does not match its graph, or None.

    Graphs are traced for one shape and dtype of each constant. Another shape or dtype in
    ``state_dict`` or ``constants`` could be read out of bounds or as other values.

    Args:
        program: Any program. Inner tensors of subclasses are checked if the graph accesses them.

    Returns:
        A sentence without full stop, with the constant's name and its user.

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
        elif (
            node.op == "call_function"
            and str(node.target) == _SUBCLASS_ACCESS
            and node.args[0] in holders
        ):
            (outer, holder), part = holders[node.args[0]], str(node.args[1])
            name, tensor = f"{outer}.{part}", getattr(holder, part, None)
        else:
            continue
        holders[node] = name, tensor
        exported = node.meta.get("val")
        if not isinstance(tensor, torch.Tensor) or not isinstance(exported, torch.Tensor):
            continue
        # Comparing symbolic sizes would add guards.
        is_static = all(isinstance(size, int) for size in exported.shape)
        if is_static and (tensor.shape, tensor.dtype) != (exported.shape, exported.dtype):
            reader = next(iter(node.users), None)
            who = f", which {describe_node(reader)} reads" if reader is not None else ""
            return (
                f"found {list(tensor.shape)} of {tensor.dtype} for {name!r}{who}; expected "
                f"{list(exported.shape)} of {exported.dtype}, as exported"
            )
    return None
