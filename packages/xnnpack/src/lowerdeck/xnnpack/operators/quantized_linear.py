"""Linear layers with integer weights: beside integers, integers found at run time, or floats."""

from __future__ import annotations

import torch
from torch import fx
from torch.types import IntLikeType as Dim

from lowerdeck.xnnpack.emit import Emission, Quantized, Tracked, shape_of
from lowerdeck.xnnpack.operators.clamps import following_clamp
from lowerdeck.xnnpack.operators.contract import FloatNeededError
from lowerdeck.xnnpack.operators.quantized_weights import (
    Filters,
    store_channels,
    store_groups,
    store_static,
    symmetric,
)
from lowerdeck.xnnpack.payload.encoding import FLOAT, PER_ROW
from lowerdeck.xnnpack.payload.layout import Layout
from lowerdeck.xnnpack.payload.schema import NONE, NodeKind

_GROUP_STEP = 32
"""The runtime takes groups of multiples of this."""


def quantized_linear(
    emission: Emission, node: fx.Node, source: fx.Node, weight: Quantized, bias: fx.Node | None
) -> None:
    """Add a linear layer whose weight is constant integers.

    Args:
        emission: Where to add.
        node: The layer.
        source: Its input.
        weight: Its weight, one row for each output.
        bias: Its bias, a constant.

    Raises:
        FloatNeededError: The runtime does not take the weight so; nothing was added.
    """
    tensor = None if bias is None else emission.constant(bias).reshape(-1).float()
    if emission.writes.is_int8:
        _static(emission, node, emission.of(source), weight, tensor)
        return
    # Halves are taken through float32: only there do all kinds of weights run everywhere.
    with emission.stored(FLOAT, FLOAT):
        if emission.is_rounded(source):
            _dynamic(emission, node, emission.of(source), weight, tensor)
        else:
            _weight_only(emission, node, emission.of(source), weight, tensor)


def _matrix(weight: Quantized) -> Filters:
    if weight.group:
        raise FloatNeededError(
            "its weight has groups, which the runtime multiplies only with inputs that are "
            "quantised at run time"
        )
    if weight.axis not in (None, 0):
        raise FloatNeededError("its weight's scales run along another dimension than its outputs")
    found = symmetric(weight)
    return Filters(found.data, found.scales, 0, found.bits)


def _static(
    emission: Emission,
    node: fx.Node,
    source: Tracked,
    weight: Quantized,
    bias: torch.Tensor | None,
) -> None:
    filters = _matrix(weight)
    filter_id, bias_id = store_static(emission, filters, bias, source.encoding)
    _add(emission, node, emission.id_of(source), filter_id, bias_id)


def _dynamic(
    emission: Emission,
    node: fx.Node,
    source: Tracked,
    weight: Quantized,
    bias: torch.Tensor | None,
) -> None:
    width = int(weight.data.shape[1])
    if weight.group:
        if weight.bits != 4 or weight.group % _GROUP_STEP or not weight.is_symmetric:
            raise FloatNeededError(
                f"its weight has groups of {weight.group} of {weight.bits} bits; the runtime "
                f"takes groups of multiples of {_GROUP_STEP} of 4 bits around 0"
            )
        filter_id = store_groups(emission, weight)
        value = emission.id_of(source)
        value = emission.dynamic(value, source.shape, Layout.PLAIN, PER_ROW)
        _add(emission, node, value, filter_id, _float_bias(emission, bias))
        return
    filters = _matrix(weight)
    value, shape = emission.id_of(source), source.shape
    if filters.bits == 4 and width % 2:
        # The runtime is silently wrong on an odd width; a 0 more changes neither sums nor ranges.
        shape = (*shape[:-1], width + 1)
        value = _padded(emission, value, shape)
        data = torch.nn.functional.pad(filters.data, (0, 1))
        filters = Filters(data, filters.scales, 0, 4)
    filter_id = store_channels(emission, filters)
    value = emission.dynamic(value, shape, Layout.PLAIN, PER_ROW)
    _add(emission, node, value, filter_id, _float_bias(emission, bias))


def _padded(emission: Emission, value: int, shape: tuple[Dim, ...]) -> int:
    none = (0,) * (len(shape) - 1)
    return emission.add(
        NodeKind.STATIC_CONSTANT_PAD,
        shape,
        pre_paddings=(*none, 0),
        post_paddings=(*none, 1),
        input_id=value,
    )


def _weight_only(
    emission: Emission,
    node: fx.Node,
    source: Tracked,
    weight: Quantized,
    bias: torch.Tensor | None,
) -> None:
    filters = _matrix(weight)
    if bias is not None:
        # The runtime multiplies the bias by the channel's scale as well.
        bias = (bias.double() / filters.scales.double().expand(filters.channels)).float()
        if not bool(torch.isfinite(bias).all()):
            raise FloatNeededError("its bias is too large beside its weight's scales")
    filter_id = store_channels(emission, filters)
    _add(emission, node, emission.id_of(source), filter_id, _float_bias(emission, bias))


def _float_bias(emission: Emission, bias: torch.Tensor | None) -> int:
    return NONE if bias is None else emission.constant_value(bias, packed=True, encoding=FLOAT)


def _add(emission: Emission, node: fx.Node, value: int, filter_id: int, bias_id: int) -> None:
    last, limits = following_clamp(node)
    result = emission.add(
        NodeKind.FULLY_CONNECTED,
        shape_of(last),
        output_range=limits,
        input1_id=value,
        filter_id=filter_id,
        bias_id=bias_id,
        flags=0,
    )
    emission.define_value(last, result)
