"""Modes that change no result, and marks of preserved calls, taken out of a program."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule, Node, map_arg

from lowerdeck.torch_base._torch_private import with_graph_module
from lowerdeck.torch_base.graphs import attribute_of, copy_graph_module, graphs_of, nested_graphs

_MARK = "_export_tracepoint"
_GRAD = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"
_SET_GRAD = "_set_grad_enabled"
_ENTER = "_enter_autocast"
_EXIT = "_exit_autocast"


def without_idle_modes(exported_program: ExportedProgram) -> ExportedProgram:
    """Return a program whose graphs hold in themselves what regions without effect held.

    ``torch.export`` puts what runs in another mode into a graph of its own, which cuts a program
    for whoever reads one graph. Gradient modes change no result, nor does autocast that is turned
    off where it was never on: what is in such regions is put in their place, node by node, and
    calls that only enter and leave such a mode go. So do export's marks of what preserved calls
    take and return, which it forgets in regions. Regions whose autocast is on stay.

    For who computes results: what would have no gradients may have them.

    Args:
        exported_program: Any program; not changed, and returned itself if it has none of these.

    Returns:
        A program on the same tensors; nodes keep their names where they can, and the signatures
        name what they named.

    Example:
        >>> import torch
        >>> class Exact(torch.nn.Module):
        ...     def forward(self, x):
        ...         with torch.autocast("cpu", enabled=False):
        ...             return x @ x
        >>> program = torch.export.export(Exact(), (torch.ones(2, 2),))
        >>> [node.name for node in without_idle_modes(program).graph.nodes]
        ['x', 'matmul', 'output']
    """
    if not any(
        _is_idle(gm, node, devices)
        for gm, devices in _casting(exported_program.graph_module)
        for node in gm.graph.nodes
    ):
        return exported_program
    copied = copy_graph_module(exported_program.graph_module)
    named = frozenset(_named(exported_program))
    for gm, devices in _casting(copied):
        _settle(gm, list(gm.graph.nodes), devices, named if gm is copied else ())
        gm.recompile()
    return with_graph_module(
        exported_program, copied, _signature(copied, exported_program.graph_signature)
    )


def _casting(graph_module: GraphModule) -> list[tuple[GraphModule, frozenset[str]]]:
    """Return each graph with the devices on which autocast may be on somewhere in or around it."""
    devices: dict[int, frozenset[str]] = {}
    waiting = [(graph_module, frozenset[str]())]
    while waiting:
        gm, around = waiting.pop()
        known = devices.get(id(gm))
        found = around | {
            str(node.args[0])
            for node in gm.graph.nodes
            if _callee(node) == _ENTER and node.args[2]
        }
        if known is not None:
            if found <= known:
                continue
            found |= known
        devices[id(gm)] = found
        for reference, inner in nested_graphs(gm):
            on = {
                str(user.args[0])
                for user in reference.users
                if _callee(user) == _AUTOCAST and user.args[2]
            }
            waiting.append((inner, found | on))
    return [(gm, devices[id(gm)]) for gm in graphs_of(graph_module)]


def _callee(node: Node) -> str | None:
    """Return the name of what changes a mode, or None for other calls."""
    if node.op != "call_function":
        return None
    name = getattr(node.target, "__name__", None)
    return name if name in _KNOWN else None


_KNOWN = frozenset({_MARK, _GRAD, _AUTOCAST, _SET_GRAD, _ENTER, _EXIT})


def _is_idle(gm: GraphModule, node: Node, devices: Collection[str]) -> bool:
    name = _callee(node)
    if name is None or name == _EXIT:
        return False
    if name == _MARK:
        return _is_read_by_element(node)
    if name == _SET_GRAD:
        return not node.users
    if name == _ENTER:
        leaves = all(_callee(user) == _EXIT and not user.users for user in node.users)
        return leaves and not node.args[2] and node.args[0] not in devices
    if name == _AUTOCAST and (node.args[2] or node.args[0] in devices):
        return False
    body = attribute_of(gm, _reference(node))
    if not isinstance(body, GraphModule) or not _is_read_by_element(node):
        return False
    results = body.graph.output_node().args[0]
    return isinstance(results, tuple | list) and all(isinstance(one, Node) for one in results)


def _is_read_by_element(node: Node) -> bool:
    return all(user.target is operator.getitem for user in node.users)


def _reference(region: Node) -> Node:
    """Return the node that names a region's graph."""
    found: Any = region.args[_body_at(region)]
    return found  # type: ignore[no-any-return]


def _body_at(region: Node) -> int:
    return 1 if _callee(region) == _GRAD else 4


def _settle(
    gm: GraphModule, nodes: Iterable[Node], devices: Collection[str], named: Collection[str]
) -> None:
    """Take what is idle among ``nodes`` out of ``gm``, in place."""
    for node in nodes:
        if not _is_idle(gm, node, devices):
            continue
        name = _callee(node)
        if name in (_SET_GRAD, _ENTER):
            for user in list(node.users):
                gm.graph.erase_node(user)
        elif name == _MARK:
            _pass_on(node, node.args, named)
        else:
            _settle(gm, _inlined(gm, node, named), devices, named)
            continue
        gm.graph.erase_node(node)


def _pass_on(call: Node, results: Any, named: Collection[str]) -> None:
    """Let who reads elements of a call's result read ``results``."""
    graph = call.graph
    for user in list(call.users):
        found = results[user.args[1]]
        user.replace_all_uses_with(found)
        graph.erase_node(user)
        if user.name in named and found.name not in named and found.op == "call_function":
            found.name = user.name


def _inlined(gm: GraphModule, region: Node, named: Collection[str]) -> list[Node]:
    """Put what a region holds into its place; return the new nodes."""
    graph, reference, at = gm.graph, _reference(region), _body_at(region)
    body: Any = attribute_of(gm, reference)
    env: dict[Node, Any] = dict(
        zip(body.graph.find_nodes(op="placeholder"), region.args[at + 1 :], strict=True)
    )
    made = []
    with graph.inserting_before(region):
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            env[node] = graph.node_copy(node, env.__getitem__)
            made.append(env[node])
            if node.op == "get_attr":
                env[node].target = _adopted(gm, str(node.target), attribute_of(body, node))
    _pass_on(region, map_arg(body.graph.output_node().args[0], env.__getitem__), named)
    graph.erase_node(region)
    if not reference.users:
        graph.erase_node(reference)
        if not graph.find_nodes(op="get_attr", target=reference.target):
            gm.delete_submodule(str(reference.target))
    return made


def _adopted(gm: GraphModule, name: str, held: object) -> str:
    """Let ``gm`` hold what a graph in it held; return under which name."""
    free, number = name.replace(".", "_"), 0
    while hasattr(gm, free) and getattr(gm, free) is not held:
        number += 1
        free = f"{name.replace('.', '_')}_{number}"
    setattr(gm, free, held)
    return free


def _named(program: ExportedProgram) -> Iterator[str]:
    """Yield the names of values that the program's signatures know."""
    for spec in program.graph_signature.output_specs:
        yield getattr(spec.arg, "name", "")
    for entry in program.module_call_graph:
        if entry.signature is not None:
            for one in (*entry.signature.inputs, *entry.signature.outputs):
                yield one.name


def _signature(gm: GraphModule, signature: ExportGraphSignature) -> ExportGraphSignature:
    """Return a signature that names the values that are returned now."""
    results: Any = gm.graph.output_node().args[0]
    outputs: list[Any] = [
        replace(spec, arg=replace(spec.arg, name=value.name))
        if isinstance(value, Node) and getattr(spec.arg, "name", value.name) != value.name
        else spec
        for spec, value in zip(signature.output_specs, results, strict=True)
    ]
    return ExportGraphSignature(list(signature.input_specs), outputs)
