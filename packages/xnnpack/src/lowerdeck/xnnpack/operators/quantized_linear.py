"""Linear layers with integer weights: beside integers, integers found at run time, or floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from lowerdeck.serializer import XnnNode, XnnOperator
from lowerdeck.xnnpack.emit import Emission, Quantized, Tracked, shape_of
from lowerdeck.xnnpack.operators.contract import FloatNeededError
from lowerdeck.xnnpack.operators.images import padded
from lowerdeck.xnnpack.operators.quantized_weights import (
    Filters,
    store_channels,
    store_groups,
    store_static,
    symmetric,
)
from lowerdeck.xnnpack.operators.results import following_clamp
from lowerdeck.xnnpack.payload.encoding import FLOAT, PER_ROW
from lowerdeck.xnnpack.payload.layout import Layout

_GROUP_STEP = 32
"""The runtime takes groups of multiples of this."""


def quantized_linear(
    emission: Emission, node: fx.Node, source: fx.Node, weight: Quantized, bias: fx.Node | None
) -> None:
    """Add a linear layer whose weight is constant integers.

    Args:
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


def group_refusal(group: int, bits: int, *, rounds: bool) -> str | None:
    """Return why the runtime multiplies no weight with such groups, None if it does.

    Args:
        group: How many neighbours of a row share a scale, 0 if all do.
        bits: How many bits one integer has.
        rounds: Whether the runtime quantises what is multiplied by them.
    """
    if group and not rounds:
        return (
            "its weight has groups, which the runtime multiplies only with inputs that are "
            "quantised at run time"
        )
    if group and (bits != 4 or group % _GROUP_STEP):
        return (
            f"its weight has groups of {group} of {bits} bits; the runtime takes groups of "
            f"multiples of {_GROUP_STEP} of 4 bits"
        )
    return None


def _check_groups(weight: Quantized, *, rounds: bool) -> None:
    reason = group_refusal(weight.group, weight.bits, rounds=rounds)
    if reason is not None:
        raise FloatNeededError(reason)


def _matrix(weight: Quantized) -> Filters:
    _check_groups(weight, rounds=False)
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
    _add(emission, node, emission.id_of(source), [filter_id], bias_id)


def _dynamic(
    emission: Emission,
    node: fx.Node,
    source: Tracked,
    weight: Quantized,
    bias: torch.Tensor | None,
) -> None:
    if weight.group:
        _check_groups(weight, rounds=True)
        filters = [store_groups(emission, one) for one in weight.summands()]
        value, shape = emission.id_of(source), source.shape
    else:
        # The runtime knows no zero points of weights: a weight that does not fit into 8 bits
        # without them is the sum of some that do, and so are their products.
        matrices = [_matrix(one) for one in weight.summands()]
        width, value, shape = int(weight.data.shape[1]), emission.id_of(source), source.shape
        if width % 2 and any(one.bits == 4 for one in matrices):
            # The runtime is silently wrong on an odd width; a 0 more changes neither sums nor
            # ranges.
            shape = (*shape[:-1], width + 1)
            none = (0,) * (len(shape) - 1)
            value = padded(emission, value, shape, (*none, 0), (*none, 1))
            matrices = [
                replace(one, data=torch.nn.functional.pad(one.data, (0, 1))) for one in matrices
            ]
        filters = [store_channels(emission, one) for one in matrices]
    value = emission.dynamic(value, shape, Layout.PLAIN, PER_ROW)
    _add(emission, node, value, filters, emission.packed(bias, FLOAT))


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
    _add(emission, node, emission.id_of(source), [filter_id], emission.packed(bias, FLOAT))


def _add(
    emission: Emission, node: fx.Node, value: int, filters: Sequence[int], bias_id: int
) -> None:
    """Add a layer for each of some filters, and their sum."""
    last, limits = following_clamp(node)
    shape, result = shape_of(last), None
    for number, filter_id in enumerate(filters):
        ids = filter_id, XnnNode.NONE if number else bias_id
        product = emission.layer(value, shape, ids, limits if len(filters) == 1 else None)
        ends = limits if number == len(filters) - 1 else None
        result = result and emission.binary(XnnOperator.ADD, result, product, ends, shape=shape)
        result = result or product
    assert result is not None
    emission.define(last, result)
