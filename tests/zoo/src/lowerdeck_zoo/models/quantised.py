"""``quantized_decomposed`` operators, static and dynamic, as quantisers leave them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed
from torch import nn

from lowerdeck_zoo.program import Of, Program

Q = torch.ops.quantized_decomposed
EPS = torch.finfo(torch.float32).eps
I8, U8, F32, F16 = torch.int8, torch.uint8, torch.float32, torch.float16
RANGES = {I8: (-128, 127), U8: (0, 255)}


def dynamic(x: torch.Tensor, dtype: torch.dtype = I8) -> Any:
    low, high = RANGES[dtype]
    scale, zero = Q.choose_qparams.tensor(x, low, high, EPS, dtype)
    steps = Q.quantize_per_tensor.tensor(x, scale, zero, low, high, dtype)
    return steps, scale, zero, Q.dequantize_per_tensor.tensor(steps, scale, zero, low, high, dtype)


def symmetric(x: torch.Tensor, dtype: torch.dtype = I8) -> Any:
    scale, zero = Q.choose_qparams_symmetric.tensor(x, -127, 127, EPS, dtype)
    steps = Q.quantize_per_tensor.tensor(x, scale, zero, -127, 127, I8)
    return steps, scale, zero, Q.dequantize_per_tensor.tensor(steps, scale, zero, -127, 127, I8)


def static(x: torch.Tensor) -> Any:
    steps = Q.quantize_per_tensor.default(x, 0.031, 3, -128, 127, I8)
    wide = Q.dequantize_per_tensor.default(steps, 0.031, 3, -128, 127, I8)
    narrow = Q.dequantize_per_tensor.default(steps, 0.031, 3, -128, 127, I8, out_dtype=F16)
    return steps, wide, narrow


def by_tensors(x: torch.Tensor) -> Any:
    scale, zero = torch.tensor([0.031]), torch.tensor([3])
    low, high = torch.tensor(-128), torch.tensor(127)
    steps = Q.quantize_per_tensor.tensor2(x, scale, zero, low, high, I8)
    return steps, Q.dequantize_per_tensor.tensor2(steps, scale, zero, low, high, I8)


def per_token_asymmetric(x: torch.Tensor) -> Any:
    scale, zero = Q.choose_qparams_per_token_asymmetric(x, I8)
    steps = Q.quantize_per_token(x, scale, zero, -128, 127, I8)
    return steps, scale, zero, Q.dequantize_per_token(steps, scale, zero, -128, 127, I8, F32)


def weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return steps, scales and zero points of six rows of two groups."""
    steps = (torch.arange(48) * 7 % 16 - 8).view(6, 8).to(I8)
    scales = (torch.arange(12.0).view(6, 2) * 0.37 % 1) + 0.1
    return steps, scales, (torch.arange(12) * 5 % 6 - 3).view(6, 2).to(torch.int32)


def groups(x: torch.Tensor) -> Any:
    rows, scales, zeros = weights()
    weight = Q.dequantize_per_channel_group(rows, scales, zeros, -8, 7, I8, 4, F32)
    return x @ weight.t()


def channels(x: torch.Tensor) -> Any:
    _, scales, zeros = weights()
    zeros = zeros[:4, 0].to(torch.int64)
    steps = Q.quantize_per_channel(x, scales[:4, 0], zeros, 0, -128, 127, I8)
    return steps, Q.dequantize_per_channel(steps, scales[:4, 0], zeros, 0, -128, 127, I8)


def linear(x: torch.Tensor) -> Any:
    rows, scales, zeros = weights()
    zeros = zeros[:, 0].to(torch.int64)
    weight = Q.dequantize_per_channel(rows, scales[:, 0], zeros, 0, -128, 127, I8)
    return nn.functional.linear(dynamic(x)[3], weight)


_FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dynamic": dynamic,
    "dynamic, bytes": lambda x: dynamic(x, U8),
    "symmetric": symmetric,
    "symmetric, bytes": lambda x: Q.choose_qparams_symmetric.tensor(x, 0, 255, EPS, U8),
    "static": static,
    "by tensors": by_tensors,
    "per token, asymmetric": per_token_asymmetric,
    "groups": groups,
    "channels": channels,
    "linear": linear,
}


class Quantized(nn.Module):
    """Byte weights with a scale a row, activations quantised and back, as pt2e leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 127, (4, 3), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(4) + 0.01)
        self.register_buffer("zeros", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ops = torch.ops.quantized_decomposed
        coded = ops.quantize_per_tensor(x, 0.1, 3, -128, 127, torch.int8)
        read = ops.dequantize_per_tensor(coded, 0.1, 3, -128, 127, torch.int8)
        weight = ops.dequantize_per_channel(
            self.weight, self.scales, self.zeros, 0, -128, 127, torch.int8
        )
        return nn.functional.linear(read, weight), coded


def _of_all_signs() -> list[tuple[torch.Tensor]]:
    shape = (4, 8)
    return [
        (torch.randn(shape) * 2,),
        (torch.rand(shape) + 1,),
        (-torch.rand(shape) - 1,),
        (torch.zeros(shape),),
    ]


PROGRAMS = (
    *(
        Program(
            f"quantised_{name.replace(',', '').replace(' ', '_')}",
            lambda function=function: Of(function),
            _of_all_signs,
            # A step of rounding may fall to the other side; nothing else may differ.
            step=0.05,
            tags="half" if function is static else "",
        )
        for name, function in _FUNCTIONS.items()
    ),
    Program(
        "quantised_static_of_half",
        lambda: Of(static),
        lambda: [((torch.randn(4, 8) * scale).to(F16),) for scale in (3, 1, 0.1)],
        step=0.05,
        tags="half",
    ),
    Program("quantised_weights", Quantized, lambda: [(torch.randn(2, 3) * s,) for s in (3, 1, 9)]),
)
