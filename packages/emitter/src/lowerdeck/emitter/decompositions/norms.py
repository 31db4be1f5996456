"""Norms whose kernels lose precision.

The kernels of layer, group and instance norms compute a variance as the mean of the squares less
the square of the mean. This cancels catastrophically if the mean is large compared to the
standard deviation. These kernels are therefore called on the input minus its mean.

Batch norms in training mode would use ``aten::var_mean``, which accumulates sequentially in
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from lowerdeck.emitter._torch_private import reference_decomposition
from lowerdeck.emitter.decompositions.sums import HALF, in_float32
from lowerdeck.torch_base import OpOverload

_ATEN = torch.ops.aten
_IS_CENTERED = ContextVar("_IS_CENTERED", default=False)
"""Whether the input of the norm being decomposed is already centered."""


def _centered(norm: OpOverload, center: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule that subtracts the mean from a norm's input, and adds it to the norm's mean.

    Args:
        center: Returns the input minus its mean, and the mean; takes the arguments of the norm.
    """
    reference = reference_decomposition(norm)

    def rule(input: torch.Tensor, *args: Any) -> Any:  # noqa: A002 - the name in the schema
        if input.dtype == torch.float64:
            # The kernel computes in float32.
            return reference(input, *args)
        if input.dtype in HALF:
            return in_float32(norm)(input, *args)
        if _IS_CENTERED.get():
            return NotImplemented
        centered, mean = center(input, *args)
        token = _IS_CENTERED.set(True)
        try:
            result, rest, scale = norm(centered, *args)
        finally:
            _IS_CENTERED.reset(token)
        return result, rest + mean.reshape(rest.shape), scale

    return rule


def _center_layers(values: torch.Tensor, normalized: Sequence[int], *_: Any) -> Any:
    mean = values.mean(tuple(range(-len(normalized), 0)), keepdim=True)
    return values - mean, mean


def _center_groups(values: torch.Tensor, *args: Any) -> Any:
    batch, channels, area, groups = args[2:6]
    rows = values.reshape(batch, groups, channels // groups * area)
    mean = rows.mean(2, keepdim=True)
    return (rows - mean).reshape(values.shape), mean


def _center_channels(values: torch.Tensor, *_: Any) -> Any:
    mean = values.mean([dim for dim in range(values.dim()) if dim != 1], keepdim=True)
    return values - mean, mean


def batch_norm(
    input: torch.Tensor,  # noqa: A002 - torch's name
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Return a batch norm with its batch statistics and the new running statistics.

    Args:
        input: The batch, with the channels in dimension 1.
        training: Whether to use batch statistics; False is not decomposed here.
        momentum: Weight of the batch statistics in the new running statistics.
    """
    if not training:
        return NotImplemented
    dims = [0, *range(2, input.dim())]
    sizes = [-1, *[1] * (input.dim() - 2)]
    wide = input.dtype if input.dtype == torch.float64 else torch.float32
    values = input.to(wide)
    mean = _mean(values, dims)
    centred = values - mean
    variance = _mean(centred * centred, dims)
    scale = torch.rsqrt(variance + eps)
    result = centred * scale
    if weight is not None:
        result = result * weight.view(sizes)
    if bias is not None:
        result = result + bias.view(sizes)
    count = input.numel() / input.shape[1]
    # Divided as tensors: with one element per channel the unbiased variance is NaN, as in eager.
    unbiased = variance * count / (count - 1)
    of_channels = [statistic.reshape(-1) for statistic in (mean, scale, unbiased)]
    return (
        result.to(input.dtype),
        of_channels[0].to(input.dtype),
        of_channels[1].to(input.dtype),
        momentum * of_channels[0] + (1 - momentum) * running_mean,
        momentum * of_channels[2] + (1 - momentum) * running_var,
    )


def _mean(values: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Return a mean with one correction step for the rounding error of the first mean."""
    rough = torch.mean(values, dims, keepdim=True)
    return rough + torch.mean(values - rough, dims, keepdim=True)


NORMS: dict[OpOverload, Callable[..., Any]] = {
    norm: _centered(norm, center)
    for norm, center in (
        (_ATEN.native_layer_norm.default, _center_layers),
        (_ATEN.native_group_norm.default, _center_groups),
        (_ATEN._native_batch_norm_legit.no_stats, _center_channels),
    )
}
BATCH_NORMS: dict[OpOverload, Callable[..., Any]] = {
    _ATEN._native_batch_norm_legit_functional.default: batch_norm,
}
