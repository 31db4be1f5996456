"""Linear layers and batched matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.serializer import XnnEncoding, XnnNode, XnnOperator
from lowerdeck.xnnpack.emit import Call, Emission, Quantized, fits_half, is_fixed, shape_of
from lowerdeck.xnnpack.operators.batch_norm import Affine, following_batch_norm
from lowerdeck.xnnpack.operators.contract import (
    FloatNeededError,
    Integers,
    Operator,
    Refusal,
    Scales,
    Table,
    table,
)
from lowerdeck.xnnpack.operators.quantized_layers import MOST_COARSE, quantized_linear
from lowerdeck.xnnpack.operators.results import following_clamp
from lowerdeck.xnnpack.payload import HALF


def _fully_connected(
    emission: Emission, node: Node, source: Node, filters: Node, bias: Node | None, flags: int
) -> None:
    """Add ``source @ filters.T + bias``; with the flag, the filters are (inputs, outputs)."""
    weight = _integers(emission, filters, flags)
    if weight is not None and (bias is None or emission.of(bias).is_constant):
        try:
            quantized_linear(emission, node, source, weight, bias)
        except FloatNeededError as why:
            if emission.writes.is_int8:
                raise
            emission.in_float[node.name] = str(why)
        else:
            return
    if emission.writes.is_int8:
        raise FloatNeededError("its weight is not quantised, or its bias is not constant")
    constants = [
        emission.of(source).is_constant for source in (filters, bias) if source is not None
    ]
    affine = None
    if all(constants) and len(shape_of(node)) == 2:
        affine = following_batch_norm(node, emission)
    last, limits = following_clamp(node if affine is None else affine.last)
    shape = shape_of(last)
    # If only one of the two is constant, the runtime frees it after the first packing but repacks
    # at every call, which crashes with memory-mapped files.
    apart = bias is not None and len(set(constants)) > 1
    ids = _weights(emission, filters, None if apart else bias, flags, affine)
    rows = emission.id_of(emission.of(source))
    result = emission.layer(rows, shape, ids, None if apart else limits, flags)
    if bias is not None and apart:
        summand = emission.plain(emission.of(bias))
        result = emission.binary(XnnOperator.ADD, result, summand, limits, shape=shape)
    emission.define(last, result)


def _integers(emission: Emission, filters: Node, flags: int) -> Quantized | None:
    """Return constant integer weights with one row per output, or None for other weights."""
    data = emission.of(filters).data
    if not isinstance(data, Quantized):
        return None
    return data.permuted((1, 0)) if flags & XnnNode.TRANSPOSE_WEIGHTS else data


def _weights(
    emission: Emission, filters: Node, bias: Node | None, flags: int, affine: Affine | None
) -> tuple[int, int]:
    if affine is None:
        bias_id = XnnNode.NONE if bias is None else _packed(emission, bias, flat=True)
        return _packed(emission, filters, encoding=_filter_encoding(emission, filters)), bias_id
    shift = None if bias is None else emission.constant(bias)
    folded, shift = affine.fold(emission.constant(filters), shift, 1 if flags else 0)
    return emission.packed(folded, _filter_encoding(emission)), emission.packed(shift)


def _filter_encoding(emission: Emission, filters: Node | None = None) -> XnnEncoding:
    """Return the encoding of a float filter: as in the program, or float16 if enabled."""
    data = None if filters is None else emission.of(filters).data
    if isinstance(data, torch.Tensor) and data.dtype == torch.float16:
        return HALF
    if filters is not None and (data is None or not emission.half_weights):
        return emission.writes
    fits = not isinstance(data, torch.Tensor) or fits_half(data)
    return HALF if fits and emission.half_weights else emission.writes


def _packed(
    emission: Emission, node: Node, *, flat: bool = False, encoding: XnnEncoding | None = None
) -> int:
    tracked = emission.of(node)
    data = tracked.data
    if data is None:
        return emission.id_of(tracked)
    # float16 filters are kept, and converted chunk by chunk.
    tensor = data if isinstance(data, torch.Tensor) else emission.constant(node)
    tensor = tensor.reshape(-1) if flat else tensor
    return emission.packed(tensor, encoding)


def _linear_refusal(call: Call) -> str | None:
    if call.rank("weight") != 2 or call.rank("input") < 1:
        return "its weight is not a matrix"
    if not is_fixed(call.shape("weight")[1]):
        return _SYMBOLIC
    if call.args["bias"] is None:
        return None
    if call.rank("bias") != 1:
        return "its bias is not a vector"
    same = str(call.shape("bias")[0]) == str(call.shape("weight")[0])
    return None if same else "its bias does not have one element for each output"


def _addmm_refusal(call: Call) -> str | None:
    if call.args["alpha"] != 1 or call.args["beta"] != 1:
        return "alpha and beta must be 1"
    if not is_fixed(call.shape("mat2")[0]):
        return _SYMBOLIC
    # The rows may have several dimensions if the pattern includes the views around the product.
    columns = call.result[-1]
    shape = call.shape("self")
    if len(shape) > 2 or shape[-1:] != (columns,) or (len(shape) == 2 and shape[0] != 1):
        return "its addend is not a single row"
    if len(shape) == 2 and not call.is_constant("self"):
        return "its addend is a matrix of one row that is not constant"
    return None


def _product(emission: Emission, call: Call) -> None:
    left, right = _factors(call)
    if len(shape_of(right)) == 2 and emission.of(right).is_constant:
        _fully_connected(emission, call.node, left, right, None, XnnNode.TRANSPOSE_WEIGHTS)
        return
    first, second = (emission.plain(emission.of(factor)) for factor in (left, right))
    kind, shape = XnnOperator.BATCH_MATRIX_MULTIPLY, call.result
    emission.define(call.node, emission.binary(kind, first, second, shape=shape))


def _factors(call: Call) -> tuple[Node, Node]:
    return call.args["self"], call.args["other" if "other" in call.args else "mat2"]


def _product_refusal(call: Call) -> str | None:
    if any(len(shape_of(factor)) < 2 for factor in _factors(call)):
        return "a factor is a vector"
    return None


def _product_int8_refusal(call: Call) -> str | None:
    right = _factors(call)[1]
    if call.is_weight(right) and len(shape_of(right)) != 2:
        return "its weight is not a matrix"
    return None


def _product_scale_refusal(call: Call, scales: Scales) -> str | None:
    right = _factors(call)[1]
    if call.is_weight(right):
        return None
    if scales.inputs[-1].zero_point != 0:
        return "its second factor's zero point is not 0, which XNNPACK needs"
    product = scales.inputs[0].scale * scales.inputs[-1].scale
    if product / scales.result.scale >= MOST_COARSE:
        return f"its sums are {MOST_COARSE} or more times coarser than its result"
    return None


def _layer(refusal: Refusal, source: str, weight: str, bias: str, flags: int = 0) -> Operator:
    """Return the operator of a linear layer with these argument names."""

    def emit(emission: Emission, call: Call) -> None:
        rows, filters, shift = (call.args[name] for name in (source, weight, bias))
        _fully_connected(emission, call.node, rows, filters, shift, flags)

    def int8_refusal(call: Call) -> str | None:
        """Return why an integer layer is computed in float."""
        factor = call.args[weight]
        if not call.is_weight(factor):
            return "its weight is not constant"
        return None if len(shape_of(factor)) == 2 else "its weight is not a matrix"

    packs = (weight, bias)
    return Operator(emit, refusal, int8_refusal=int8_refusal, packs=packs, **_OPTIONS)


_SYMBOLIC = "its width is symbolic, and empty rows crash the runtime"
_OPTIONS: Mapping[str, Any] = {"integers": Integers.CHOOSES, "clamps": True}
LINEAR: Table = table(
    {
        "linear": _layer(_linear_refusal, "input", "weight", "bias"),
        "addmm": _layer(_addmm_refusal, "mat1", "mat2", "self", XnnNode.TRANSPOSE_WEIGHTS),
        "mm bmm matmul": Operator(
            _product,
            _product_refusal,
            int8_refusal=_product_int8_refusal,
            scale_refusal=_product_scale_refusal,
            packs=("other", "mat2"),
            **_OPTIONS,
        ),
    }
)
