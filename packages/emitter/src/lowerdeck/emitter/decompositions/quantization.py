"""Quantize and dequantize as arithmetic: the runtime has no kernels for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowerdeck.emitter.decompositions.dynamic_quantization import DYNAMIC_QUANTIZATION, check_range
from lowerdeck.torch_base import OpOverload


def quantization_rules() -> dict[OpOverload, Callable[..., Any]]:
    """Return rules for the ``quantized_decomposed`` operators registered in this process."""
    space = torch.ops.quantized_decomposed
    rules: dict[OpOverload, Callable[..., Any]] = {}
    every: tuple[tuple[str, str, Callable[..., Any]], ...] = (
        ("quantize_per_tensor", "default", _quantize),
        ("quantize_per_tensor", "tensor", _quantize),
        ("quantize_per_tensor", "tensor2", _quantize),
        ("dequantize_per_tensor", "default", _dequantize),
        ("dequantize_per_tensor", "tensor", _dequantize),
        ("dequantize_per_tensor", "tensor2", _dequantize),
        ("quantize_per_channel", "default", _quantize_channels),
        ("dequantize_per_channel", "default", _dequantize_channels),
        *DYNAMIC_QUANTIZATION,
    )
    for name, overload, rule in every:
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
    check_range(quant_min, quant_max, dtype)
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
    check_range(quant_min, quant_max, dtype)
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
