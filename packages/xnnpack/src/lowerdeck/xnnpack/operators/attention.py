"""Softmax, and attention composed of the runtime's nodes."""

from __future__ import annotations

import math

from lowerdeck.serializer import XnnNode, XnnOperator
from lowerdeck.xnnpack.emit import Call, Emission, Tracked, is_fixed, joined, symbols_refusal
from lowerdeck.xnnpack.operators.contract import (
    Operator,
    Table,
    first_of,
    function,
    has_dimensions,
    keeps_dtype,
    table,
)
from lowerdeck.xnnpack.operators.masks import mask_of, mask_refusal
from lowerdeck.xnnpack.payload import Layout


def _softmax(e: Emission, x: Tracked, call: Call) -> Tracked:
    rank, axis = len(x.shape), call.axis()
    layout = Layout.CHANNELS_LAST if axis == 1 and rank >= 3 else Layout.PLAIN
    if layout.position(axis, rank) == rank - 1:
        return e.unary(XnnOperator.SOFTMAX, x, layout=layout)
    # The runtime's softmax is along the last dimension: transpose before and after.
    swap = list(range(rank))
    swap[axis], swap[-1] = swap[-1], swap[axis]
    return e.transposed(e.unary(XnnOperator.SOFTMAX, e.transposed(x, swap)), swap)


def _attention(emission: Emission, call: Call) -> None:
    query, key, value = (emission.of(call.args[name]) for name in _TENSORS)
    scale = call.args["scale"]
    factor = 1 / math.sqrt(int(query.shape[-1])) if scale is None else float(scale)
    many = _heads_per_group(call)
    if many > 1 and any(symbols_refusal(operand.shape) for operand in (query, key, value)):
        # A separate dimension for query heads that share a key head would need more copies.
        key, value = (_repeat_heads(emission, operand, many) for operand in (key, value))
        many = 1
    mask = mask_of(emission, call, many)
    query, key, value = (emission.plain(operand) for operand in (query, key, value))
    batch = call.result[:-1]
    if many > 1:
        # Query heads that share a key head broadcast against it, in a separate dimension.
        query, key, value = (
            _split_heads(emission, operand, group)
            for operand, group in ((query, many), (key, 1), (value, 1))
        )
        batch = query.shape[:-1]
    product = XnnOperator.BATCH_MATRIX_MULTIPLY
    scores = emission.binary(
        product,
        emission.binary(XnnOperator.MULTIPLY, query, factor),
        key,
        shape=(*batch, key.shape[-2]),
        flags=XnnNode.TRANSPOSE_WEIGHTS,
    )
    if mask.added is not None:
        scores = emission.binary(XnnOperator.ADD, scores, mask.added, shape=scores.shape)
    weights = emission.unary(XnnOperator.SOFTMAX, scores)
    result = emission.binary(product, weights, value, shape=(*batch, value.shape[-1]))
    if mask.kept is not None:
        result = emission.binary(XnnOperator.MULTIPLY, result, mask.kept, shape=result.shape)
    if many > 1:
        result = emission.view(result, call.result)
    emission.define(call.node, result)


def _split_heads(emission: Emission, tracked: Tracked, many: int) -> Tracked:
    """Split the heads into groups of ``many``, which become a separate dimension."""
    *batch, heads, rows, columns = tracked.shape
    return emission.view(tracked, (*batch, int(heads) // many, many, rows, columns))


def _repeat_heads(emission: Emission, tracked: Tracked, many: int) -> Tracked:
    """Return the tensor with each head repeated ``many`` times."""
    heads = [emission.sliced(tracked, 1, head, 1) for head in range(int(tracked.shape[1]))]
    return joined(emission, [tensor for tensor in heads for _ in range(many)], 1)


def _heads_per_group(call: Call) -> int:
    if not call.args.get("enable_gqa"):
        return 1
    heads, groups = (int(call.shape(name)[-3]) for name in ("query", "key"))
    return heads // groups


def _attention_refusal(call: Call) -> str | None:
    args = call.args
    if args["dropout_p"]:
        return "it applies dropout"
    if min(call.rank(name) for name in _TENSORS) < 3:
        return "it has fewer than 3 dimensions"
    if not is_fixed(call.shape("query")[-1]):
        return "its width is symbolic"
    lengths = [call.shape(name)[-2] for name in _TENSORS[:2]]
    if args["is_causal"] and not all(map(is_fixed, lengths)):
        return "it is causal over a symbolic length"
    return None


def _group_refusal(call: Call) -> str | None:
    if not call.args.get("enable_gqa"):
        return None
    query, key, value = (call.shape(name) for name in _TENSORS)
    if any(len(shape) != 4 or not is_fixed(shape[1]) for shape in (query, key, value)):
        return (
            "its query, key or value does not have 4 dimensions, or has a symbolic number of heads"
        )
    return None if key[1] == value[1] else "its keys and values are grouped differently"


_TENSORS = ("query", "key", "value")
_SOFTMAX = function(_softmax, keeps_dtype, has_dimensions, wide=True)
ATTENTION: Table = table(
    {
        "_softmax softmax.int": _SOFTMAX,
        "scaled_dot_product_attention": Operator(
            _attention,
            first_of(_attention_refusal, mask_refusal, _group_refusal),
            wide=True,
            bools=("attn_mask",),
        ),
    }
)
