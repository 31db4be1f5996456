"""Unbacked symbols, of which each trace of a call creates new ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from lowerdeck.decompose._torch_private import raw_expression, rebind, replace_symbol
from lowerdeck.torch_base import SYMBOLS, FakeTensorMode, expression_of, pytree


def bind(mode: FakeTensorMode, source: Node | None, graph: Graph, result: Any) -> bool:
    """Let symbols that came up be those of the original program; return whether any came up.

    A node binds only what no other did before: of two calls of ``where`` on one mask torch knows
    that they give as much, so that the second binds nothing. What is traced by itself makes
    symbols all the same. Those that the result does not tell stay as they are.

    Args:
        mode: The mode of the fake tensors.
        source: The node of the original program that was traced; None if there is none.
        graph: What it became; its nodes know what they bind.
        result: What it returned.
    """
    environment: Any = mode.shape_env
    if environment is None:
        return False
    binding = [node.meta["unbacked_bindings"] for node in graph.nodes if _binds(node)]
    made = {*environment.pending_fresh_unbacked_symbols, *(s for each in binding for s in each)}
    if not made or source is None:
        return bool(made)
    rebind(environment, source, result)
    for new, old in zip(*map(_numbers, (result, source.meta.get("val"))), strict=False):
        symbol = raw_expression(new) if isinstance(new, SYMBOLS) else None
        # Known sizes need no binding, nor does a symbol that was bound by an earlier element.
        if symbol not in made or symbol in environment.replacements:
            continue
        replace_symbol(environment, symbol, _expression(old, symbol))
        for each in binding:
            each.pop(symbol, None)
    for node in graph.nodes:
        bound = node.meta.pop("unbacked_bindings", None)
        if bound:
            names = environment.unbacked_renamings
            node.meta["unbacked_bindings"] = {names.get(s, s): at for s, at in bound.items()}
    return True


def _expression(number: Any, like: Any) -> Any:
    """Return the symbol that a size goes by in the original program, or what it is there."""
    if not isinstance(number, SYMBOLS):
        return like * 0 + number
    known = expression_of(number)
    # What was found to be a number was a symbol before.
    return known if known.is_Symbol else raw_expression(number)


def _binds(node: Node) -> bool:
    return bool(node.meta.get("unbacked_bindings"))


def _numbers(tree: Any) -> list[Any]:
    """Return the sizes of all tensors of a tree, and its numbers."""
    leaves = pytree.tree_leaves(tree)
    return [n for x in leaves for n in (x.shape if isinstance(x, torch.Tensor) else (x,))]
