"""Results of modules that are their arguments, told apart from these in a program.

A program has one name for an argument and a result that is the same tensor, and nothing of a
module that only returns what it is given. An alias made by such a module is its result then. So
is the second of two arguments, or of two results, that are one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node, traceback

from lowerdeck.torch_base import MemoryUse, OpOverload, graphs_of, pytree, schema_of
from lowerdeck.unflatten.calls.carrying import (
    ARGUMENT_READ,
    ITSELF,
    RETURNED,
    TWICE,
    UNREAD_RESULT,
    UNREAD_TWICE,
    is_itself,
)

_ALIAS = torch.ops.aten.alias.default


@contextmanager
def results_aliased(
    model: torch.nn.Module, recorded: Sequence[str], *, apart: bool = True
) -> Iterator[None]:
    """Let modules return aliases of those of their results that are their arguments.

    Args:
        model: The model.
        recorded: The modules whose signatures are recorded. Others keep the containers that they
            return, which may be changed by another name.
        apart: Whether a recorded module that is given or returns one tensor twice has an alias
            for the second. Its code may ask whether they are one.
    """
    names: dict[torch.nn.Module, list[str]] = {}
    for path in recorded:
        names.setdefault(model.get_submodule(path), []).append(path)
    with ExitStack() as stack:
        for module in model.modules():
            if module is model:
                continue
            told = names.get(module, ())
            twice = " ".join(told) if apart and told and not _asks_for_one(module) else ""
            if twice:
                before = _aliasing_arguments(twice)
                handle = module.register_forward_pre_hook(before, with_kwargs=True)
                stack.callback(handle.remove)
            after = _aliasing(" ".join(told), twice=twice)
            handle = module.register_forward_hook(after, with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _asks_for_one(module: torch.nn.Module) -> bool:
    """Return whether one product is made for what are one tensor, and several for copies."""
    return any(isinstance(inner, torch.nn.MultiheadAttention) for inner in module.modules())


def has_told_apart(program: ExportedProgram) -> bool:
    """Return whether a module of the program is given or returns an alias of a second tensor."""
    nodes = (node for held in graphs_of(program.graph_module) for node in held.graph.nodes)
    return any(TWICE in (node.meta.get("custom") or ()) for node in nodes)


def _aliasing_arguments(twice: str) -> Callable[..., Any]:
    """Return the hook that gives a module an alias for what it is given once more."""

    def before(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        if len(_different(leaves)) == len(leaves):
            return None
        seen = _different([])

        def one(leaf: Any) -> Any:
            if not _is_tensor(leaf):
                return leaf
            if _is_among(leaf, seen):
                return _alias(leaf, {ITSELF: True, TWICE: twice})
            seen[_key(leaf, seen)] = leaf
            return leaf

        found: tuple[Any, Any] = pytree.tree_map(one, (args, kwargs))
        return found

    return before


def _different(leaves: Sequence[Any]) -> dict[int, Any]:
    """Return the different ones of some tensors, by what ``_key`` says of them."""
    found: dict[int, Any] = {}
    for leaf in leaves:
        if not _is_among(leaf, found):
            found[_key(leaf, found)] = leaf
    return found


def _is_among(leaf: Any, among: dict[int, Any]) -> bool:
    # Strict export traces this, and does not know which number a tensor has.
    if torch.compiler.is_dynamo_compiling():
        return any(leaf is other for other in among.values())
    return id(leaf) in among


def _key(leaf: Any, among: dict[int, Any]) -> int:
    return len(among) if torch.compiler.is_dynamo_compiling() else id(leaf)


def _alias(leaf: Any, told: dict[str, Any]) -> Any:
    # Strict export keeps what it is told of nodes; the other one asks.
    is_strict = torch.compiler.is_dynamo_compiling()
    keeping = nullcontext() if is_strict else traceback.preserve_node_meta()
    with keeping, traceback.annotate(told):
        return _ALIAS(leaf)


def _aliasing(recorded: str, *, twice: str) -> Callable[..., Any]:
    """Return the hook; it holds no module, which strict export would name by the hook."""

    def after(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        if not recorded and not _is_tensor(result):
            return None
        given = _different(list(filter(_is_tensor, pytree.tree_leaves((args, kwargs)))))
        seen = _different([])

        def one(leaf: Any) -> Any:
            if not _is_tensor(leaf):
                return leaf
            if _is_among(leaf, given):
                return _alias(leaf, {ITSELF: recorded})
            if twice and _is_among(leaf, seen):
                return _alias(leaf, {ITSELF: True, TWICE: twice})
            seen[_key(leaf, seen)] = leaf
            return leaf

        leaves = list(filter(_is_tensor, pytree.tree_leaves(result)))
        is_given = any(_is_among(leaf, given) for leaf in leaves)
        if not is_given and not (twice and len(_different(leaves)) < len(leaves)):
            return None
        return pytree.tree_map(one, result)

    return after


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def drop_other_aliases(program: ExportedProgram) -> None:
    """Take those aliases out of ``program`` that decomposing would lose, with their names.

    Those are whose memory is written anywhere, and which nobody reads. What the program does not
    tell without them is noted: which arguments are read or written as such after a module
    returned them.
    """
    graphs = list(graphs_of(program.graph_module))
    aliases = [(held, node) for held in graphs for node in held.graph.nodes if is_itself(node)]
    if not aliases:
        return
    memory = MemoryUse.of_program(program)
    writes = any(_writes(node) for held in graphs for node in held.graph.nodes)
    renamed: dict[str, str] = {}
    # From the back: what only reads another alias goes first.
    for held, node in reversed(aliases):
        custom = node.meta["custom"]
        twice, returned = custom.get(TWICE), custom[ITSELF]
        node.meta["custom"] = {ITSELF: True, **_unread(node)}
        writers = memory.writers(node) if held is program.graph_module else [node] * writes
        if not writers and any(map(_reads, node.users)):
            continue
        source: Any = node.args[0]
        if twice is not None:
            if not writers:
                _note_unread(source, UNREAD_TWICE, twice)
            _drop(held.graph, node, renamed)
            continue
        is_read = any(user > node for user in source.users)
        known = [other for other in held.graph.nodes if other < node] if writers else []
        group = memory.group(source)
        alike = (other for other in known if memory.group(other) is group)
        if is_read or any(user > node for other in alike for user in other.users):
            source.meta["custom"] = {**(source.meta.get("custom") or {}), ARGUMENT_READ: is_read}
        source.meta["custom"] = {**(source.meta.get("custom") or {}), RETURNED: True}
        if not writers and returned:
            _note_unread(source, UNREAD_RESULT, returned)
        _drop(held.graph, node, renamed)
    for held in graphs if renamed else ():
        held.recompile()
    signatures = [entry.signature for entry in program.module_call_graph if entry.signature]
    leaves = [spec for signature in signatures for spec in (*signature.inputs, *signature.outputs)]
    for leaf in (*leaves, *(spec.arg for spec in program.graph_signature.output_specs)):
        while getattr(leaf, "name", None) in renamed:
            leaf.name = renamed[leaf.name]


def _note_unread(source: Node, key: str, names: str) -> None:
    custom = source.meta.get("custom") or {}
    paths = {**custom.get(key, {}), **dict.fromkeys(names.split(" "), True)}
    source.meta["custom"] = {**custom, key: paths}


def _unread(node: Node) -> dict[str, Mapping[str, bool]]:
    """Return what was noted of modules that are given or return ``node``."""
    custom = node.meta.get("custom") or {}
    return {key: custom[key] for key in (UNREAD_TWICE, UNREAD_RESULT) if key in custom}


def _drop(graph: Graph, node: Node, renamed: dict[str, str]) -> None:
    source: Any = node.args[0]
    for key, paths in _unread(node).items():
        _note_unread(source, key, " ".join(paths))
    node.replace_all_uses_with(source)
    graph.erase_node(node)
    renamed[node.name] = source.name


def _reads(node: Node) -> bool:
    return bool(node.users) or node.op == "output" or _writes(node)


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable
