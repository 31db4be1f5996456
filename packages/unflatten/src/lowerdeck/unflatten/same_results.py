"""Results of modules that are their arguments, told apart from these in a program.

A program has one name for an argument and a result that is the same tensor, and nothing of a
module that only returns what it is given. An alias made by such a module is its result then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node, traceback

from lowerdeck.torch_base import MemoryUse, OpOverload, graphs_of, pytree, schema_of
from lowerdeck.unflatten.calls.carrying import ARGUMENT_READ, ITSELF, is_itself

_ALIAS = torch.ops.aten.alias.default


@contextmanager
def results_aliased(model: torch.nn.Module, recorded: Sequence[str]) -> Iterator[None]:
    """Let modules return aliases of those of their results that are their arguments.

    Args:
        model: The model.
        recorded: The modules whose signatures are recorded. Others keep the containers that they
            return, which may be changed by another name.
    """
    known = set(map(model.get_submodule, recorded))
    with ExitStack() as stack:
        for module in model.modules():
            if module is not model:
                after = _aliasing(is_recorded=module in known)
                handle = module.register_forward_hook(after, with_kwargs=True)
                stack.callback(handle.remove)
        yield


def _aliasing(*, is_recorded: bool) -> Callable[..., Any]:
    """Return the hook; it holds no module, which strict export would name by the hook."""

    def after(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)]

        def one(leaf: Any) -> Any:
            if not _is_tensor(leaf) or not any(leaf is other for other in given):
                return leaf
            # Strict export keeps what it is told of nodes; the other one asks.
            is_strict = torch.compiler.is_dynamo_compiling()
            keeping = nullcontext() if is_strict else traceback.preserve_node_meta()
            with keeping, traceback.annotate({ITSELF: True}):
                return _ALIAS(leaf)

        if not is_recorded and not _is_tensor(result):
            return None
        if not any(leaf is other for leaf in pytree.tree_leaves(result) for other in given):
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
        node.meta["custom"] = {ITSELF: True}
        writers = memory.writers(node) if held is program.graph_module else [node] * writes
        if not writers and any(map(_reads, node.users)):
            continue
        source: Any = node.args[0]
        is_read = any(user > node for user in source.users)
        known = [other for other in held.graph.nodes if other < node] if writers else []
        group = memory.group(source)
        alike = (other for other in known if memory.group(other) is group)
        if is_read or any(user > node for other in alike for user in other.users):
            source.meta["custom"] = {**(source.meta.get("custom") or {}), ARGUMENT_READ: is_read}
        node.replace_all_uses_with(source)
        held.graph.erase_node(node)
        renamed[node.name] = source.name
    for held in graphs if renamed else ():
        held.recompile()
    signatures = [entry.signature for entry in program.module_call_graph if entry.signature]
    leaves = [spec for signature in signatures for spec in (*signature.inputs, *signature.outputs)]
    for leaf in (*leaves, *(spec.arg for spec in program.graph_signature.output_specs)):
        while getattr(leaf, "name", None) in renamed:
            leaf.name = renamed[leaf.name]


def _reads(node: Node) -> bool:
    return bool(node.users) or node.op == "output" or _writes(node)


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable
