"""Patterns of data movement: channel shuffles (ShuffleNet) and concatenations.

Decomposed rolls, ``pixel_shuffle`` and ``pixel_unshuffle`` are not restored.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from lowerdeck.torch_base import arguments_of
from lowerdeck.xnnpack.emit import is_fixed, same_sizes, shape_of
from lowerdeck.xnnpack.operators.shapes import order_of
from lowerdeck.xnnpack.patterns.matching import Match, Piece, is_empty
from lowerdeck.xnnpack.patterns.pieces import ANY, Arguments, OperatorPattern, X, turned, view

_aten = torch.ops.aten


def _channel_shuffle(match: Match) -> Arguments | None:
    x, apart, joined = (shape_of(match.bindings[name]) for name in ("x", "apart", "together"))
    if len(x) != 4 or len(apart) != 5 or not all(map(is_fixed, (*x[1:], *apart[1:]))):
        return None
    groups = int(apart[1])
    if not groups or int(x[1]) % groups:
        return None
    grouped = (x[0], groups, int(x[1]) // groups, *x[2:])
    if not same_sizes(apart, grouped) or not same_sizes(joined, x):
        return None
    return (
        (match.bindings["x"], groups)
        if order_of(match.bindings["turned"]) == [0, 2, 1, 3, 4]
        else None
    )


def _joined_alone(match: Match) -> Arguments | None:
    tensors = arguments_of(match.pieces[0])["tensors"]
    full = [tensor for tensor in tensors if not _is_always_empty(tensor)]
    return (full[0],) if len(full) == 1 else None


def _is_always_empty(node: Node) -> bool:
    """Return whether a tensor is empty and depends only on empty tensors and constants.

    An empty slice of a tensor with elements does not count: the tensor may depend on the delegate.
    """
    return is_empty(node) and all(map(_is_always_empty, node.all_input_nodes))


# Typically the empty initial cache of a transformer.
JOINS = (OperatorPattern(_aten.clone.default, Piece("cat", ANY, ANY), _joined_alone),)
SHUFFLES = (
    OperatorPattern(
        _aten.channel_shuffle.default,
        view(turned(view(X, "apart"), "turned"), "together"),
        _channel_shuffle,
    ),
)
