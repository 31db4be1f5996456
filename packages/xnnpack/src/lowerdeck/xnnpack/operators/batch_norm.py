"""Batch norm with fixed statistics: folded into the preceding layer, or two nodes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import Node

from lowerdeck.serializer import XnnOperator
from lowerdeck.torch_base import arguments_of
from lowerdeck.xnnpack.emit import Call, Emission, Tracked
from lowerdeck.xnnpack.operators.contract import Operator, Table
from lowerdeck.xnnpack.operators.results import first_result, first_result_refusal, following_clamp
from lowerdeck.xnnpack.payload import Layout

_aten = torch.ops.aten
_NORMS = (_aten.batch_norm.default, _aten._native_batch_norm_legit_no_training.default)


class Affine(NamedTuple):
    """Batch norm with fixed statistics, as ``x * scale + shift`` for each channel.

    Attributes:
        scale: Factor of each channel, in float64.
        shift: Bias of each channel, in float64.
        last: The node that returns the result.
    """

    scale: torch.Tensor
    shift: torch.Tensor
    last: Node

    def fold(
        self, filters: torch.Tensor, bias: torch.Tensor | None, channel_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the filters and the bias of a layer with the batch norm folded in.

        Args:
            filters: Filters of the preceding layer.
            channel_dim: The dimension of the output channels in the filters.
        """
        sizes = [-1 if dim == channel_dim else 1 for dim in range(filters.dim())]
        shift = self.shift if bias is None else bias.reshape(-1).double() * self.scale + self.shift
        return (filters.double() * self.scale.reshape(sizes)).float(), shift.float()


def following_batch_norm(node: Node, emission: Emission) -> Affine | None:
    """Return the batch norm that is the only user of a layer, or None unless it is constant."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    if user.target not in _NORMS:
        return None
    args = arguments_of(user)
    weight, bias, *running = (args[name] for name in _NAMES)
    if args.get("training") or None in running or args["input"] is not node:
        return None
    read = [source for source in (weight, bias, *running) if source is not None]
    all_constant = all(source in emission and emission.of(source).is_constant for source in read)
    alone = first_result_refusal(Call(user, args, ())) is None
    return _affine(user, emission) if all_constant and alone else None


_NAMES = ("weight", "bias", "running_mean", "running_var")


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
    tracked = emission.of(call.args["input"])
    affine = _affine(call.node, emission)
    rank, shape = len(tracked.shape), tracked.shape
    layout = tracked.preferred if rank > 2 else Layout.PLAIN
    sizes = (1, shape[1], *(1,) * (rank - 2))

    def operand(numbers: torch.Tensor) -> Tracked:
        data = numbers.float().reshape(1, -1, *sizes[2:]).permute(layout.permutation(rank))
        return emission.tracked(sizes, emission.constant_value(data), layout)

    scale, shift = operand(affine.scale), operand(affine.shift)
    last, limits = following_clamp(affine.last)
    result = emission.binary(XnnOperator.MULTIPLY, tracked, scale, shape=shape)
    emission.define(last, emission.binary(XnnOperator.ADD, result, shift, limits, shape=shape))


def _refusal(call: Call) -> str | None:
    args = call.args
    if args.get("training") or args["running_mean"] is None or args["running_var"] is None:
        return "it has no fixed statistics"
    if not all(map(call.is_constant, _NAMES)):
        return "its statistics, weight or bias are not constant"
    if call.rank("input") < 2:
        return "it needs at least 2 dimensions"
    return first_result_refusal(call)


BATCH_NORMS: Table = dict.fromkeys(_NORMS, Operator(_emit, _refusal, wide=True))
