"""``quantized_decomposed`` operators, static and dynamic, give eager's numbers as arithmetic."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch import nn
from torch.utils import _pytree as pytree

from lowerdeck.emitter import emit
from lowerdeck_zoo import assert_close, official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

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


def per_token(x: torch.Tensor) -> Any:
    scale, zero = Q.choose_qparams_per_token(x, I8)
    steps = Q.quantize_per_token(x, scale, zero, -128, 127, I8)
    return steps, scale, Q.dequantize_per_token(steps, scale, zero, -128, 127, I8, F32)


def per_token_asymmetric(x: torch.Tensor) -> Any:
    scale, zero = Q.choose_qparams_per_token_asymmetric(x, I8)
    steps = Q.quantize_per_token(x, scale, zero, -128, 127, I8)
    return steps, scale, zero, Q.dequantize_per_token(steps, scale, zero, -128, 127, I8, F32)


WEIGHT = torch.randint(-8, 8, (6, 8), dtype=I8)
SCALES, ZEROS = torch.rand(6, 2) + 0.1, torch.randint(-3, 3, (6, 2), dtype=torch.int32)


def groups(x: torch.Tensor) -> Any:
    steps = Q.quantize_per_channel_group(x, SCALES[:4], ZEROS[:4], -8, 7, I8, 4)
    weight = Q.dequantize_per_channel_group(WEIGHT, SCALES, ZEROS, -8, 7, I8, 4, F32)
    return steps, x @ weight.t()


def channels(x: torch.Tensor) -> Any:
    zeros = ZEROS[:4, 0].to(torch.int64)
    steps = Q.quantize_per_channel(x, SCALES[:4, 0], zeros, 0, -128, 127, I8)
    return steps, Q.dequantize_per_channel(steps, SCALES[:4, 0], zeros, 0, -128, 127, I8)


def linear(x: torch.Tensor) -> Any:
    zeros = ZEROS[:, 0].to(torch.int64)
    weight = Q.dequantize_per_channel(WEIGHT, SCALES[:, 0], zeros, 0, -128, 127, I8)
    return nn.functional.linear(dynamic(x)[3], weight)


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dynamic": dynamic,
    "dynamic, bytes": lambda x: dynamic(x, U8),
    "symmetric": symmetric,
    "symmetric, bytes": lambda x: Q.choose_qparams_symmetric.tensor(x, 0, 255, EPS, U8),
    "static": static,
    "by tensors": by_tensors,
    "per token": per_token,
    "per token, asymmetric": per_token_asymmetric,
    "groups": groups,
    "channels": channels,
    "linear": linear,
}
INPUTS = {
    "of both signs": torch.randn(4, 8) * 2,
    "positive": torch.rand(4, 8) + 1,
    "negative": -torch.rand(4, 8) - 1,
    "zero": torch.zeros(4, 8),
}


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_quantized_program_gives_eagers_numbers_and_types(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    function = FUNCTIONS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        emitted = emit(torch.export.export(Of(function), (torch.randn(4, 8),)))
    emitted.save(tmp_path / "model.pte")
    calls = [official.Call((x,)) for x in INPUTS.values()]
    expected = [pytree.tree_leaves(function(x)) for x in INPUTS.values()]
    for source in (emitted.to_bytes(), tmp_path / "model.pte"):
        outcome = official.run(source, calls)
        assert isinstance(outcome, official.Ran), outcome
        for got, wanted in zip(outcome.outputs, expected, strict=True):
            assert [one.dtype for one in got] == [one.dtype for one in wanted]
            for one, other in zip(got, wanted, strict=True):
                # A step of rounding may fall to the other side; nothing else may differ.
                off = (one.double() - other.double()).abs()
                limit = 1.0 if not other.is_floating_point() else 0.05 + 0.02 * other.abs().max()
                assert off.max() <= limit
                assert (off > 1e-5 + 1e-4 * other.double().abs()).double().mean() <= 0.05


def test_half_precision_is_quantized_in_single_precision() -> None:
    x = (torch.randn(4, 8) * 3).to(F16)
    function = FUNCTIONS["static"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        emitted = emit(torch.export.export(Of(function), (x,)))
    outcome = official.run(emitted.to_bytes(), [official.Call((x,))])
    assert isinstance(outcome, official.Ran), outcome
    assert_close(outcome.outputs[0], list(function(x)))
