"""Batch normalisation: with fixed statistics folded into what comes before, or two nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from lowerdeck.serializer import XnnOperator
from lowerdeck.torch_base import arguments_of
from lowerdeck.xnnpack.emit import Call, Emission
from lowerdeck.xnnpack.operators.clamps import following_clamp
from lowerdeck.xnnpack.operators.contract import Operator, Table
from lowerdeck.xnnpack.operators.first_result import (
    first_result,
    first_result_refusal,
)
from lowerdeck.xnnpack.operators.normalization import (
    batch_statistics_norm,
    batch_statistics_refusal,
)
from lowerdeck.xnnpack.payload.layout import Layout

_aten = torch.ops.aten
_SINGLE = {_aten.batch_norm.default}
_TRIPLE = {_aten._native_batch_norm_legit_no_training.default}


@dataclass(frozen=True, slots=True)
class Affine:
    """What a batch norm with fixed statistics computes: ``x * scale + shift`` for each channel.

    Attributes:
        scale: Factor of each channel, in float64.
        shift: Summand of each channel, in float64.
        last: The node that holds the result.
    """

    scale: torch.Tensor
    shift: torch.Tensor
    last: Node


def following_batch_norm(node: Node, emission: Emission) -> Affine | None:
    """Return the batch norm that is a node's only user, or None.

    Args:
        node: A convolution or a linear layer.
        emission: Where the constants of the batch norm are known.

    Returns:
        Its factors and summands, if its statistics are constants of the partition.
    """
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    if user.target not in _SINGLE and user.target not in _TRIPLE:
        return None
    args = arguments_of(user)
    if args.get("training") or first_result_refusal(Call(user, args, ())) is not None:
        return None
    names = ("weight", "bias", "running_mean", "running_var")
    for name in names:
        one = args[name]
        if one is None and name.startswith("running"):
            return None
        if one is not None and (one not in emission or not emission.of(one).is_constant):
            return None
    if args["input"] is not node:
        return None
    return _affine(user, emission)


def _affine(node: Node, emission: Emission) -> Affine:
    args = arguments_of(node)
    mean, variance = (
        emission.constant(args[name]).double() for name in ("running_mean", "running_var")
    )
    scale = torch.rsqrt(variance + args["eps"])
    if args["weight"] is not None:
        scale = scale * emission.constant(args["weight"])
    shift = -mean * scale
    if args["bias"] is not None:
        shift = shift + emission.constant(args["bias"])
    return Affine(scale, shift, first_result(node))


def _emit(emission: Emission, call: Call) -> None:
    if call.args.get("training"):
        batch_statistics_norm(emission, call)
        return
    affine = _affine(call.node, emission)
    tracked = emission.of(call.args["input"])
    rank, layout = len(tracked.shape), tracked.preferred
    sizes = (1, -1, *(1,) * (rank - 2))
    scale, shift = (
        emission.constant_value(one.float().reshape(sizes).permute(layout.permutation(rank)))
        for one in (affine.scale, affine.shift)
    )
    last, limits = following_clamp(affine.last)
    value = emission.add(
        XnnOperator.MULTIPLY,
        tracked.shape,
        layout,
        input1_id=emission.id_of(tracked, layout),
        input2_id=scale,
    )
    value = emission.add(
        XnnOperator.ADD, tracked.shape, layout, limits, input1_id=value, input2_id=shift
    )
    emission.define_value(last, value, layout if rank > 2 else Layout.PLAIN)


def _refusal(call: Call) -> str | None:
    args = call.args
    if args.get("training"):
        if args["running_mean"] is not None or args["running_var"] is not None:
            return "it updates statistics"
        return batch_statistics_refusal(call)
    if args["running_mean"] is None or args["running_var"] is None:
        return "it has no fixed statistics"
    if not all(
        call.is_constant(name) for name in ("weight", "bias", "running_mean", "running_var")
    ):
        return "its statistics are not constant"
    if call.rank("input") < 2:
        return "it needs at least 2 dimensions"
    return first_result_refusal(call)


BATCH_NORMS: Table = dict.fromkeys([*_SINGLE, *_TRIPLE], Operator(_emit, _refusal, wide=True))
