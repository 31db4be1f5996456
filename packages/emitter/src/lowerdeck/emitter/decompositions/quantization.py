"""Quantization as arithmetic: choosing scales and zero points, and applying them.

The runtime has no kernels for the ``quantized_decomposed`` operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowerdeck.torch_base import OpOverload


def quantization_rules() -> dict[OpOverload, Callable[..., Any]]:
    """Return rules for the ``quantized_decomposed`` operators registered in this process."""
    space = torch.ops.quantized_decomposed
    rules: dict[OpOverload, Callable[..., Any]] = {}
    for name, overloads, rule in _RULES:
        for overload in overloads.split():
            target = getattr(getattr(space, name, None), overload, None)
            if target is not None:
                rules[target] = rule
    return rules


def _quantize(
    input: torch.Tensor,  # noqa: A002 - the name in the schema
    scale: Any,
    zero_point: Any,
    quant_min: Any,
    quant_max: Any,
    dtype: torch.dtype,
) -> torch.Tensor:
    _check_range(quant_min, quant_max, dtype)
    # torch reads scales as Python numbers, so it computes in float32 whatever their dtype.
    factor = _number(1.0 / scale, torch.float32)
    steps = torch.round(input.to(torch.float32) * factor) + _number(zero_point, torch.float32)
    low, high = _number(quant_min, torch.float32), _number(quant_max, torch.float32)
    return torch.clamp(steps, low, high).to(dtype)


def _number(value: Any, dtype: torch.dtype) -> Any:
    """Return a one-element tensor without dimensions, or a number unchanged."""
    return value.to(dtype).reshape(()) if isinstance(value, torch.Tensor) else value


def _dequantize(
    input: torch.Tensor,  # noqa: A002 - the name in the schema
    scale: Any,
    zero_point: Any,
    _quant_min: Any,
    _quant_max: Any,
    _dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    result = out_dtype if out_dtype is not None else torch.float32
    shifted: torch.Tensor = input.to(result) - _number(zero_point, result)
    scaled: torch.Tensor = shifted * _number(scale, result)
    return scaled


def _quantize_channels(
    input: torch.Tensor,  # noqa: A002 - the name in the schema
    scales: torch.Tensor,
    zero_points: torch.Tensor,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    _check_range(quant_min, quant_max, dtype)
    factor = torch.reciprocal(_along(scales, axis, input.dim())).to(input.dtype)
    steps = torch.round(input * factor) + _along(zero_points, axis, input.dim())
    return torch.clamp(steps, quant_min, quant_max).to(dtype)


def _dequantize_channels(
    input: torch.Tensor,  # noqa: A002 - the name in the schema
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    axis: int,
    _quant_min: int,
    _quant_max: int,
    _dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    result = out_dtype if out_dtype is not None else torch.float32
    steps = input.to(result)
    if zero_points is not None:
        steps = steps - _along(zero_points, axis, input.dim())
    return (steps * _along(scales, axis, input.dim())).to(result)


def _along(values: torch.Tensor, axis: int, rank: int) -> torch.Tensor:
    shape = [1] * rank
    shape[axis] = -1
    return values.view(shape)


def _check_range(quant_min: Any, quant_max: Any, dtype: torch.dtype) -> None:
    """Check, as eager does, that the limits fit the dtype; a cast would wrap around.

    Raises:
        ValueError: A limit is out of the dtype's range.
    """
    if dtype.is_floating_point or not all(isinstance(end, int) for end in (quant_min, quant_max)):
        return
    limits = torch.iinfo(dtype)
    if quant_min < limits.min or quant_max > limits.max:
        raise ValueError(
            f"found integers of {quant_min} to {quant_max}, expected {limits.min} to "
            f"{limits.max} at most, which {dtype} holds"
        )


def _choose(
    input: torch.Tensor,  # noqa: A002 - the name in the schema
    quant_min: int,
    quant_max: int,
    eps: float,
    _dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = _range(input)
    scale = torch.clamp((high - low) / float(quant_max - quant_min), min=eps)
    zero_point = quant_min - torch.round(low / scale).to(torch.int32)
    return _one(scale, torch.float64), _one(
        torch.clamp(zero_point, quant_min, quant_max), torch.int64
    )


def _choose_symmetric(
    input: torch.Tensor,  # noqa: A002 - the name in the schema
    quant_min: int,
    quant_max: int,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = _range(input)
    scale = torch.maximum(-low, high) / (float(quant_max - quant_min) / 2)
    zero_point = 128 if dtype == torch.uint8 else 0
    scale = _one(torch.clamp(scale, min=eps), torch.float64)
    return scale, torch.full((1,), zero_point, dtype=torch.int64, device=input.device)


def _range(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the minimum and the maximum, extended to include zero."""
    wide = values.to(torch.float32)
    return torch.clamp(torch.amin(wide), max=0.0), torch.clamp(torch.amax(wide), min=0.0)


def _one(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.reshape((1,)).to(dtype)


def _choose_per_token_asymmetric(
    input: torch.Tensor,  # noqa: A002 - the name in the schema
    _dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    low = torch.clamp(torch.amin(input, dim=-1, keepdim=True), max=0.0)
    high = torch.clamp(torch.amax(input, dim=-1, keepdim=True), min=0.0)
    scale = torch.clamp((high - low) / 255.0, min=torch.finfo(torch.float32).eps)
    from_low, from_high = low / scale, high / scale
    # Use the end of the range whose rounding error is smaller.
    zero_point = torch.where(
        (from_low - 128) + (from_high + 127) > 0, -128 - from_low, 127 - from_high
    )
    rounded = torch.round(torch.clamp(zero_point, -128, 127))
    return scale.to(torch.float64), rounded.to(torch.int64)


def _quantize_per_token(
    input: torch.Tensor,  # noqa: A002 - the name in the schema
    scales: torch.Tensor,
    zero_points: torch.Tensor,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    _check_range(quant_min, quant_max, dtype)
    steps = torch.round(input * (1.0 / scales) + zero_points)
    return torch.clamp(steps, quant_min, quant_max).to(dtype)


def _dequantize_per_token(
    input: torch.Tensor,  # noqa: A002 - the name in the schema
    scales: torch.Tensor,
    zero_points: torch.Tensor,
    _quant_min: int,
    _quant_max: int,
    _dtype: torch.dtype,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    return ((input - zero_points) * scales).to(output_dtype)


def _dequantize_groups(
    input: torch.Tensor,  # noqa: A002 - the name in the schema
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    _quant_min: int,
    _quant_max: int,
    _dtype: torch.dtype,
    group_size: int,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    if group_size > input.shape[-1] and scales.shape[-1] == 1:
        group_size = input.shape[-1]
    groups = input.reshape(-1, group_size)
    if zero_points is not None:
        groups = groups - zero_points.reshape(-1, 1)
    return (groups * scales.reshape(-1, 1)).reshape(input.shape).to(output_dtype)


_RULES: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("quantize_per_tensor", "default tensor tensor2", _quantize),
    ("dequantize_per_tensor", "default tensor tensor2", _dequantize),
    ("quantize_per_channel", "default", _quantize_channels),
    ("dequantize_per_channel", "default", _dequantize_channels),
    ("choose_qparams", "tensor", _choose),
    ("choose_qparams_symmetric", "tensor", _choose_symmetric),
    ("choose_qparams_per_token_asymmetric", "default", _choose_per_token_asymmetric),
    ("quantize_per_token", "default", _quantize_per_token),
    ("dequantize_per_token", "default", _dequantize_per_token),
    ("dequantize_per_channel_group", "default", _dequantize_groups),
)
"""Name, overloads and rule of each operator."""
