"""Softmax, and attention, which the runtime knows only in its parts."""

from __future__ import annotations

import math

import torch

from lowerdeck.xnnpack.emit.arguments import Call, is_fixed, shape_of
from lowerdeck.xnnpack.emit.emission import Emission
from lowerdeck.xnnpack.operators.contract import Operator, Table
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
    width = query.shape[-1]
    scale = call.args["scale"]
    factor = 1 / math.sqrt(int(width)) if scale is None else float(scale)
    scaled = emission.add(
        NodeKind.MULTIPLY,
        query.shape,
        input1_id=emission.id_of(query),
        input2_id=emission.id_of(emission.scalar(factor)),
    )
    scores_shape = (*shape_of(call.node)[:-1], key.shape[-2])
    scores = emission.add(
        NodeKind.BATCH_MATRIX_MULTIPLY,
        scores_shape,
        input1_id=scaled,
        input2_id=emission.id_of(key),
        flags=TRANSPOSE_WEIGHTS,
    )
    if call.args["is_causal"]:
        rows, columns = (int(size) for size in scores_shape[-2:])
        mask = torch.full((rows, columns), -math.inf).triu(diagonal=1)
        scores = emission.add(
            NodeKind.ADD,
            scores_shape,
            input1_id=scores,
            input2_id=emission.constant_value(mask),
        )
    weights = emission.add(NodeKind.SOFTMAX, scores_shape, input_id=scores)
    result = emission.add(
        NodeKind.BATCH_MATRIX_MULTIPLY,
        shape_of(call.node),
        input1_id=weights,
        input2_id=emission.id_of(value),
    )
    emission.define_value(call.node, result)


def _attention_refusal(call: Call) -> str | None:
    args = call.args
    if args["attn_mask"] is not None:
        # A row that is masked out wholly gives 0 in torch and NaN here.
        return "it has a mask"
    if args["dropout_p"]:
        return "it drops out"
    if args.get("enable_gqa"):
        return "its heads are grouped"
    if min(call.rank(name) for name in ("query", "key", "value")) < 3:
        return "it has fewer than 3 dimensions"
    if not is_fixed(call.shape("query")[-1]):
        return "its width is symbolic"
    lengths = (call.shape("query")[-2], call.shape("key")[-2])
    if args["is_causal"] and not all(is_fixed(length) for length in lengths):
        return "it is causal over a symbolic length"
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
        _attention, _attention_refusal, wide=True
    ),
}
