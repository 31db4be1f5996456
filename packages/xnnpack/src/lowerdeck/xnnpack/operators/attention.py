"""Softmax, and attention, which the runtime knows only in its parts."""

from __future__ import annotations

import math

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.xnnpack.emit import Call, Emission, Tracked, is_fixed, joined, shape_of
from lowerdeck.xnnpack.operators.contract import Operator, Table
from lowerdeck.xnnpack.operators.masks import mask_of, mask_refusal
from lowerdeck.xnnpack.operators.pieces import stretch
from lowerdeck.xnnpack.payload.layout import Layout
from lowerdeck.xnnpack.payload.schema import TRANSPOSE_WEIGHTS, NodeKind

_aten = torch.ops.aten


def _softmax(emission: Emission, call: Call) -> None:
    tracked = emission.of(call.args["self"])
    rank, axis = len(tracked.shape), call.axis()
    layout = Layout.CHANNELS_LAST if axis == 1 and rank >= 3 else Layout.PLAIN
    if layout.position(axis, rank) == rank - 1:
        value = emission.id_of(tracked, layout)
        result = emission.add(NodeKind.SOFTMAX, tracked.shape, layout, input_id=value)
        emission.define_value(call.node, result, layout)
        return
    # The runtime's softmax runs along the last dimension: swap ours with it, and back.
    swap = list(range(rank))
    swap[axis], swap[-1] = swap[-1], swap[axis]
    shape = [tracked.shape[one] for one in swap]
    value = emission.permuted(emission.id_of(tracked), swap, shape)
    value = emission.add(NodeKind.SOFTMAX, shape, input_id=value)
    emission.define_value(call.node, emission.permuted(value, swap, tracked.shape))


def _softmax_refusal(call: Call) -> str | None:
    if call.args.get("half_to_float"):
        return "it changes the dtype"
    return None if call.rank("self") >= 1 else "it has no dimension"


def _attention(emission: Emission, call: Call) -> None:
    query, key, value = (emission.of(call.args[name]) for name in ("query", "key", "value"))
    scale = call.args["scale"]
    factor = 1 / math.sqrt(int(query.shape[-1])) if scale is None else float(scale)
    many = _heads_per_group(call)
    if many > 1 and _symbols(call) > 1:
        # A dimension of their own for heads that share a key would need more copies.
        key, value = (_repeated(emission, one, many) for one in (key, value))
        many = 1
    mask = mask_of(emission, call, many)
    query_id, key_id, value_id = (emission.id_of(one) for one in (query, key, value))
    shape = query.shape
    if many > 1:
        # Heads that share a key broadcast against it, in a dimension of their own.
        query_id, shape = _apart(emission, query, many)
        key_id, _ = _apart(emission, key, 1)
        value_id, _ = _apart(emission, value, 1)
    batch = shape if many > 1 else shape_of(call.node)
    scaled = emission.add(
        NodeKind.MULTIPLY,
        shape,
        input1_id=query_id,
        input2_id=emission.id_of(emission.scalar(factor)),
    )
    scores_shape = (*batch[:-1], key.shape[-2])
    scores = emission.add(
        NodeKind.BATCH_MATRIX_MULTIPLY,
        scores_shape,
        input1_id=scaled,
        input2_id=key_id,
        flags=TRANSPOSE_WEIGHTS,
    )
    if mask.added is not None:
        scores = emission.add(
            NodeKind.ADD, scores_shape, input1_id=scores, input2_id=emission.id_of(mask.added)
        )
    weights = emission.add(NodeKind.SOFTMAX, scores_shape, input_id=scores)
    shape = (*batch[:-1], value.shape[-1])
    result = emission.add(
        NodeKind.BATCH_MATRIX_MULTIPLY, shape, input1_id=weights, input2_id=value_id
    )
    if mask.kept is not None:
        result = emission.add(
            NodeKind.MULTIPLY, shape, input1_id=result, input2_id=emission.id_of(mask.kept)
        )
    if many > 1:
        result = emission.reshaped(result, shape_of(call.node))
    emission.define_value(call.node, result)


def _apart(emission: Emission, tracked: Tracked, many: int) -> tuple[int, tuple[Dim, ...]]:
    """Return a tensor of heads with each ``many`` of them in a dimension of their own."""
    *batch, heads, rows, columns = tracked.shape
    shape = (*batch, int(heads) // many, many, rows, columns)
    return emission.reshaped(emission.id_of(tracked), shape), shape


def _repeated(emission: Emission, tracked: Tracked, many: int) -> Tracked:
    """Return heads, each ``many`` times."""
    batch, heads, rows, columns = tracked.shape
    each = [emission.id_of(stretch(emission, tracked, 1, head, 1)) for head in range(int(heads))]
    shape = (batch, int(heads) * many, rows, columns)
    parts = [(one, 1) for one in each for _ in range(many)]
    return emission.tracked(shape, joined(emission, parts, shape, 1, Layout.PLAIN))


def _symbols(call: Call) -> int:
    """Return how many sizes of the operands vary, in that which has most."""
    names = ("query", "key", "value")
    return max(sum(not is_fixed(size) for size in call.shape(name)) for name in names)


def _heads_per_group(call: Call) -> int:
    if not call.args.get("enable_gqa"):
        return 1
    heads, groups = (int(call.shape(name)[-3]) for name in ("query", "key"))
    return heads // groups


def _attention_refusal(call: Call) -> str | None:
    args = call.args
    if args["dropout_p"]:
        return "it drops out"
    if min(call.rank(name) for name in ("query", "key", "value")) < 3:
        return "it has fewer than 3 dimensions"
    if not is_fixed(call.shape("query")[-1]):
        return "its width is symbolic"
    lengths = (call.shape("query")[-2], call.shape("key")[-2])
    if args["is_causal"] and not all(is_fixed(length) for length in lengths):
        return "it is causal over a symbolic length"
    return mask_refusal(call) or _group_refusal(call)


def _group_refusal(call: Call) -> str | None:
    if not call.args.get("enable_gqa"):
        return None
    shapes = [call.shape(name) for name in ("query", "key", "value")]
    if any(len(shape) != 4 or not is_fixed(shape[1]) for shape in shapes):
        return "its heads are grouped in other than 4 dimensions, or by a symbolic number"
    if shapes[1][1] != shapes[2][1]:
        return "its keys and values are grouped differently"
    return None


_SOFTMAX = Operator(_softmax, _softmax_refusal, wide=True)


def _softmax_int_refusal(call: Call) -> str | None:
    if call.args["dtype"] not in (None, torch.float32, call.args["self"].meta["val"].dtype):
        return "it changes the dtype"
    return _softmax_refusal(call)


ATTENTION: Table = {
    _aten._softmax.default: _SOFTMAX,
    _aten.softmax.int: Operator(_softmax, _softmax_int_refusal, wide=True),
    _aten.scaled_dot_product_attention.default: Operator(
        _attention, _attention_refusal, wide=True, truths=("attn_mask",)
    ),
}
