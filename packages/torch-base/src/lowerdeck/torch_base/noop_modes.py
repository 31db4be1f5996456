"""Remove no-op mode regions and tracepoints of preserved calls."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from lowerdeck.torch_base._torch_private import with_parts
from lowerdeck.torch_base.graphs import attribute_of, copy_graph_module, graphs_of, renamed_outputs

_TRACEPOINT = "_export_tracepoint"
_AUTOCAST = "wrap_with_autocast"
# Argument index of a region's graph.
_BODY_AT = {"wrap_with_set_grad_enabled": 1, _AUTOCAST: 4}
_SET_GRAD = "_set_grad_enabled"
_ENTER = "_enter_autocast"
_EXIT = "_exit_autocast"


def remove_noop_mode_regions(exported_program: ExportedProgram) -> ExportedProgram:
    """Return a program with no-op mode regions (gradient modes, disabled autocast) inlined.

    ``torch.export`` outlines calls in another mode to a nested graph, which partitions cannot
    cross. Gradient modes do not change results, nor does disabled autocast in a program that never
    enables it. Calls that enter and exit such modes, and tracepoints in regions, are removed too.
    Values that had no gradients in the program may have gradients in the result.

    Args:
        exported_program: Any program; not changed, and returned itself if it has no such modes.

    Returns:
        A program that shares all tensors; node and signature names are kept where possible.

    Example:
        >>> import torch
        >>> class Exact(torch.nn.Module):
        ...     def forward(self, x):
        ...         with torch.autocast("cpu", enabled=False):
        ...             return x @ x
        >>> program = torch.export.export(Exact(), (torch.ones(2, 2),))
        >>> [node.name for node in remove_noop_mode_regions(program).graph.nodes]
        ['x', 'getitem', 'output']
    """
    graphs = list(graphs_of(exported_program.graph_module))
    casts = any(_enables_autocast(node) for gm in graphs for node in gm.graph.nodes)
    if not any(_is_noop(gm, node, casts) for gm in graphs for node in gm.graph.nodes):
        return exported_program
    copied = copy_graph_module(exported_program.graph_module)
    named = frozenset(_named(exported_program))
    # Innermost first, so that inlined graphs have no no-op modes.
    for gm in reversed(list(graphs_of(copied))):
        _remove_noops(gm, casts, named if gm is copied else ())
        gm.recompile()
    signature = renamed_outputs(exported_program.graph_signature, copied.graph)
    return with_parts(exported_program, graph_module=copied, graph_signature=signature)


def _name(node: Node) -> str:
    # By name: loaded programs have other operator objects.
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _enables_autocast(node: Node) -> bool:
    return _name(node) in (_AUTOCAST, _ENTER) and bool(node.args[2])


def _is_noop(gm: GraphModule, node: Node, casts: bool) -> bool:
    """Return whether a mode node is a no-op; ``casts``: whether the program enables autocast."""
    name = _name(node)
    if name == _TRACEPOINT:
        return all(user.target is operator.getitem for user in node.users)
    if name == _SET_GRAD:
        return not node.users
    if name == _ENTER:
        return not casts and all(_name(user) == _EXIT and not user.users for user in node.users)
    if name not in _BODY_AT or (name == _AUTOCAST and casts):
        return False
    body = attribute_of(gm, _reference(node))
    if not isinstance(body, GraphModule):
        return False
    results = body.graph.output_node().args[0]
    return isinstance(results, tuple | list) and all(isinstance(item, Node) for item in results)


def _reference(region: Node) -> Node:
    """Return the get_attr node of a region's graph."""
    reference: Any = region.args[_BODY_AT[_name(region)]]
    return reference  # type: ignore[no-any-return]


def _remove_noops(gm: GraphModule, casts: bool, named: Collection[str]) -> None:
    """Remove no-op modes from one graph in place."""
    for node in list(gm.graph.nodes):
        if not _is_noop(gm, node, casts):
            continue
        if _name(node) in _BODY_AT:
            _inline(gm, node, named)
            continue
        if _name(node) == _TRACEPOINT:
            _replace_results(node, node.args, named)
        for user in list(node.users):
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)


def _replace_results(call: Node, results: Any, named: Collection[str]) -> None:
    """Replace getitem nodes of a call by ``results``."""
    for user in list(call.users):
        result = results[user.args[1]]
        user.replace_all_uses_with(result)
        call.graph.erase_node(user)
        if user.name in named and result.name not in named and result.op == "call_function":
            result.name = user.name


def _inline(gm: GraphModule, region: Node, named: Collection[str]) -> None:
    """Replace a region by the nodes of its graph."""
    graph, reference = gm.graph, _reference(region)
    body: Any = attribute_of(gm, reference)
    operands = region.args[_BODY_AT[_name(region)] + 1 :]
    env: dict[Node, Any] = dict(
        zip(body.graph.find_nodes(op="placeholder"), operands, strict=True)
    )
    with graph.inserting_before(region):
        results = graph.graph_copy(body.graph, env)
    for node in body.graph.find_nodes(op="get_attr"):
        env[node].target = _add_attribute(gm, str(node.target), attribute_of(body, node))
    _replace_results(region, results, named)
    graph.erase_node(region)
    if not reference.users:
        graph.erase_node(reference)
        if not graph.find_nodes(op="get_attr", target=reference.target):
            gm.delete_submodule(str(reference.target))


def _add_attribute(gm: GraphModule, name: str, value: object) -> str:
    """Add an attribute to ``gm`` under a unique name; return the name."""
    free, number = name.replace(".", "_"), 0
    while hasattr(gm, free) and getattr(gm, free) is not value:
        number += 1
        free = f"{name.replace('.', '_')}_{number}"
    setattr(gm, free, value)
    return free


def _named(program: ExportedProgram) -> Iterator[str]:
    """Yield the value names in the program's signatures."""
    for spec in program.graph_signature.output_specs:
        yield getattr(spec.arg, "name", "")
    for entry in program.module_call_graph:
        if entry.signature is not None:
            for argument in (*entry.signature.inputs, *entry.signature.outputs):
                yield argument.name
