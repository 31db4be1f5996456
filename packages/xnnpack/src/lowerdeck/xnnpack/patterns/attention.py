"""Patterns of attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.torch_base import arguments_of
from lowerdeck.xnnpack.emit import is_fixed, same_sizes, shape_of
from lowerdeck.xnnpack.patterns.matching import Amount, Both, LastAxis, Leaf, Match, Pattern, Piece
from lowerdeck.xnnpack.patterns.pieces import (
    ANY,
    DIV,
    MUL,
    Arguments,
    OperatorPattern,
    swaps_last_two,
    turned,
    view,
)

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default


def _scaled(pattern: Pattern, name: str) -> Pattern:
    """Return a pattern of a tensor, possibly multiplied or divided by a number."""
    return (
        Piece(MUL, pattern, Amount(f"{name} times")),
        Piece(DIV, pattern, Amount(f"{name} by")),
        pattern,
    )


def _number(number: float) -> Piece:
    return Piece("scalar_tensor", number)


# Bool masks are converted to floats before they are added.
_MASK = (Piece("where.self", Leaf("mask"), _number(0.0), _number(-math.inf)), Leaf("mask"))


def _scores() -> Pattern:
    keys = (
        _scaled(turned(Leaf("key"), "turned"), "key"),
        turned(_scaled(Leaf("key"), "key"), "turned"),
    )
    product = Piece("matmul bmm", _scaled(Leaf("query"), "query"), keys)
    scores = _scaled(product, "scores")
    added = Piece("add.Tensor", scores, _MASK, commutes=True, name="masked")
    return (added, scores)


def _weights(scores: Pattern) -> Pattern:
    """Return the pattern of a softmax; torch may replace the NaN of rows of only -inf by 0."""
    plain = (
        Piece("_softmax", scores, LastAxis(), False),
        Piece("softmax.int", scores, LastAxis()),
    )
    low = Piece("eq.Scalar", Leaf("scores"), -math.inf)
    empty = Piece("logical_not", Piece("any.dim", Piece("logical_not", low), LastAxis(), True))
    zeros = Piece("full_like", Leaf("weights"), 0)
    softmax = Piece("_softmax", Both(Leaf("scores"), scores), LastAxis(), False)
    safe = Piece("where.self", empty, zeros, Both(Leaf("weights"), softmax), name="safe")
    return (safe, plain)


def _attention(match: Match) -> Arguments | None:
    query, key, value, mask = (
        match.bindings.get(name) for name in ("query", "key", "value", "mask")
    )
    shapes = [shape_of(leaf) for leaf in (query, key, value)]  # type: ignore[arg-type]  # leaves
    if not swaps_last_two(match.bindings["turned"]) or len(shapes[0]) < 3:
        return None
    if not all(same_sizes(shape[:-2], shapes[0][:-2]) for shape in shapes[1:]):
        return None
    if not same_sizes(shapes[0][-1:], shapes[1][-1:]):
        return None
    if mask is not None and not _only_masks(match, (*shapes[0][:-1], shapes[1][-2])):
        return None
    scale = 1.0
    for name in ("query", "key", "scores"):
        scale *= match.bindings.get(f"{name} times", 1.0)
        divisor = match.bindings.get(f"{name} by", 1.0)
        scale = scale / divisor if divisor else math.nan
    return (query, key, value, mask, 0.0, False, scale) if math.isfinite(scale) else None


def _only_masks(match: Match, scores: Sequence[Dim]) -> bool:
    """Return whether a mask broadcasts to the scores, and its fully masked rows become 0."""
    return "safe" in match.bindings and same_sizes(shape_of(match.bindings["masked"]), scores)


def _repeated(name: str) -> Piece:
    """Return a pattern of heads repeated for grouped-query attention."""
    single = Piece("unsqueeze", Leaf(name), 2)
    many = Piece("expand", single, ANY, name=f"many {name}")
    return view(many, f"all {name}")


def _grouped(match: Match) -> Arguments | None:
    args = arguments_of(match.pieces[0])
    key, value = (match.bindings[name] for name in ("key", "value"))
    for name, source in (("key", key), ("value", value)):
        shape, many = shape_of(source), shape_of(match.bindings[f"many {name}"])
        heads = shape_of(match.bindings[f"all {name}"])
        if len(shape) != 4 or not all(map(is_fixed, (shape[1], many[2]))):
            return None
        if not same_sizes(many, (*shape[:2], many[2], *shape[2:])):
            return None
        if not same_sizes(heads, (shape[0], int(shape[1]) * int(many[2]), *shape[2:])):
            return None
    if not same_sizes(shape_of(args["query"])[:2], shape_of(match.bindings["all key"])[:2]):
        return None
    return (args["query"], key, value, args["attn_mask"], 0.0, args["is_causal"],
            args["scale"], True)  # fmt: skip


_PRODUCT = "matmul bmm"
ATTENTION = (
    OperatorPattern(_ATTENTION, Piece(_PRODUCT, _weights(_scores()), Leaf("value")), _attention),
)
GROUPS = (
    OperatorPattern(
        _ATTENTION,
        Piece(
            *("scaled_dot_product_attention", Leaf("query"), _repeated("key"), _repeated("value")),
            *((Leaf("mask"), None), 0, ANY, ANY, False),
        ),
        _grouped,
    ),
)
