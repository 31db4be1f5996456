"""Export a model with the call signatures of its modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram, export
from torch.fx import Node

from lowerdeck.torch_base import HigherOrderOperator, MemoryUse, graphs_of, writes_in_place
from lowerdeck.unflatten.errors import UnsupportedProgramError
from lowerdeck.unflatten.metadata import (
    INNER,
    MODULE_NUMBERS,
    NOT_RECORDED,
    PASS_THROUGH,
    RESULT,
    UNREAD,
    is_pass_through,
)
from lowerdeck.unflatten.recording import Recorder, note_inner_leaves
from lowerdeck.unflatten.swaps import refusal_of

_TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set")
"""Attributes of a module that hold its state."""


def export_preserving(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    **options: Any,
) -> ExportedProgram:
    """Return ``model`` exported with the call signatures of its modules.

    The modules of ``unflatten(program)`` then have eager's signatures: they can be called alone,
    hooked, wrapped, or replaced by eager modules. Some modules cannot be recorded: those that take
    or return text, symbolic numbers or classes that are not pytree nodes, mutate an argument
    container, or are called in a branch, among others. ``swappable()`` lists them with reasons.

    Args:
        model: The module; it and the other arguments are as for ``torch.export.export``.
        **options: Further options of ``torch.export.export``.

    Raises:
        UnsupportedProgramError: ``model`` is not a module, or the options have
            ``preserve_module_call_signature`` or ``strict=True``.

    Example:
        >>> import torch
        >>> from lowerdeck.unflatten import export_preserving, unflatten
        >>> eager = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> module = unflatten(export_preserving(eager, (torch.ones(1, 2),)))
        >>> module.set_submodule("1", torch.nn.Tanh())
        >>> bool((module(torch.ones(1, 2)) == torch.tanh(eager[0](torch.ones(1, 2)))).all())
        True
    """
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedProgramError(
            f"expected a torch.nn.Module to export; found a {type(model).__name__}."
        )
    if "preserve_module_call_signature" in options:
        raise UnsupportedProgramError(
            "found preserve_module_call_signature among the options; export_preserving records "
            "the signature of every module: remove the option, or call torch.export.export."
        )
    if options.get("strict"):
        raise UnsupportedProgramError(
            "found strict=True; export_preserving records calls in a non-strict export: remove "
            "the option, or call torch.export.export."
        )
    # All names of shared modules: export records each call under the name used.
    modules = {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if path and not refusal_of(module)
    }
    # torch interprets a graph module without calling its modules.
    recorder = Recorder({} if isinstance(model, torch.fx.GraphModule) else modules)

    def run() -> ExportedProgram:
        keywords = dict(kwargs) if kwargs is not None else None
        with _state_restored(model):
            return export(model, args, keywords, dynamic_shapes=dynamic_shapes, **options)

    program = recorder.record(run)
    _drop_aliases(program)
    note_inner_leaves(program)
    if recorder.refusals:
        _store_note(program, NOT_RECORDED, recorder.refusals)
    if numbers := _numbers_of_tied(model):
        _store_note(program, MODULE_NUMBERS, numbers)
    return program


@contextmanager
def _state_restored(model: torch.nn.Module) -> Iterator[None]:
    """Restore the tensors of all modules: an export may leave fake tensors behind.

    Other attributes are kept: in transformers they record installed hooks.
    """
    states = [vars(module) for module in model.modules()]
    tables = [(state[name], state[name].copy()) for state in states for name in _TABLES]
    tensors = [(state, _tensors_in(state)) for state in states]
    try:
        yield
    finally:
        for table, values in tables:
            table.clear()
            table.update(values)
        for state, known in tensors:
            for name in _tensors_in(state).keys() - known.keys():
                del state[name]
            state.update(known)


def _tensors_in(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _numbers_of_tied(model: torch.nn.Module) -> dict[str, int]:
    """Number the names of modules of one type that share all state; equal numbers are one module.

    A stateless module is numbered only if it has several names.
    """
    alike: dict[object, dict[str, int]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if not path:
            continue
        tensors = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        state = tuple([(name, id(tensor)) for name, tensor in tensors])
        alike.setdefault((type(module), state or id(module)), {})[path] = id(module)
    numbers: dict[int, int] = {}
    return {
        path: numbers.setdefault(identity, len(numbers))
        for names in alike.values()
        if len(names) > 1
        for path, identity in names.items()
    }


def _store_note(program: ExportedProgram, key: str, notes: Mapping[str, Any]) -> None:
    """Store notes about modules in metadata that survives saving.

    Args:
        key: Kind of note.
        notes: Values by module name.
    """
    nodes = [node for inner in graphs_of(program.graph_module) for node in inner.graph.nodes]
    first = next((node for node in nodes if node.op == "call_function"), None)
    for node in nodes:
        stack = node.meta.get("nn_module_stack") or {}
        paths = {path for path, _ in stack.values()}
        if node is first or isinstance(node.target, HigherOrderOperator):
            paths = set(notes)
        own = {path: notes[path] for path in paths if path in notes}
        if own:
            node.meta["custom"] = {**(node.meta.get("custom") or {}), key: own}


def _drop_aliases(program: ExportedProgram) -> None:
    """Erase pass-through aliases (``is_pass_through``) that decomposition would drop.

    These are unused aliases and aliases of mutated memory. A mutated argument that is afterwards
    used only as the result is marked with ``RESULT``.
    """
    graphs = [module.graph for module in graphs_of(program.graph_module)]
    aliases = [(graph, node) for graph in graphs for node in graph.nodes if is_pass_through(node)]
    if not aliases:
        return
    memory = MemoryUse.of_program(program)
    has_writes = any(map(writes_in_place, graphs_of(program.graph_module)))
    renamed: dict[str, str] = {}
    # A module also returns the aliases that its children return.
    paths: dict[str, dict[str, bool]] = {}
    for entry in program.module_call_graph:
        for leaf in entry.signature.outputs if entry.signature else ():
            paths.setdefault(leaf.name, {})[entry.fqn.partition("@")[0]] = True
    for graph, node in reversed(aliases):
        source: Any = node.args[0]
        is_outermost = graph is program.graph
        is_written = bool(memory.writers(node)) if is_outermost else has_writes
        if node.users and not is_written:
            continue
        if is_written and node.users and is_outermost:
            group = memory.group(source)
            alike = [
                other for other in graph.nodes if other < node and memory.group(other) is group
            ]
            if not any(user > node for other in alike for user in other.users):
                custom = source.meta.get("custom") or {}
                source.meta["custom"] = {**custom, RESULT: True}
        custom = node.meta["custom"]
        unread = dict(custom.get(UNREAD, {}))
        if not node.users:
            unread |= {custom[PASS_THROUGH]: True, **paths.get(_leaf_name(node), {})}
        if unread:
            notes = source.meta.get("custom") or {}
            source.meta["custom"] = {**notes, UNREAD: {**notes.get(UNREAD, {}), **unread}}
        renamed[_leaf_name(node)] = _leaf_name(source)
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    signatures = [entry.signature for entry in program.module_call_graph if entry.signature]
    leaves = [leaf for part in signatures for leaf in (*part.inputs, *part.outputs)]
    for leaf in (*leaves, *(spec.arg for spec in program.graph_signature.output_specs)):
        while getattr(leaf, "name", None) in renamed:
            leaf.name = renamed[leaf.name]
    for module in graphs_of(program.graph_module) if renamed else ():
        module.recompile()


def _leaf_name(node: Node) -> str:
    """Return the name of a node in signatures."""
    name: str = (node.meta.get("custom") or {}).get(INNER, node.name)
    return name
