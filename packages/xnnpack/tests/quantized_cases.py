"""Small quantised models, written as PT2E and torchao write them, with inputs for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from case_making import Case  # type: ignore[import-not-found]
from case_making import case as plain_case
from torch import nn

# torch's own; importing it makes the operators known
importlib.import_module("torch.ao.quantization.fx._decomposed")
Tensor = torch.Tensor
qd = torch.ops.quantized_decomposed
_LIMITS = (-128, 127, torch.int8)


@dataclass(frozen=True)
class Step:
    """One scale and zero point."""

    scale: float
    zero: int = 0

    def quantize(self, x: Tensor) -> Tensor:
        """Return 8-bit integers."""
        integers: Tensor = qd.quantize_per_tensor(x, self.scale, self.zero, *_LIMITS)
        return integers

    def dequantize(self, x: Tensor) -> Tensor:
        """Return real numbers."""
        real: Tensor = qd.dequantize_per_tensor(x, self.scale, self.zero, *_LIMITS)
        return real

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor rounded to the integers and back."""
        return self.dequantize(self.quantize(x))


IN, OTHER, OUT = Step(0.03, 5), Step(0.021, -17), Step(0.05, -9)
_as_runtime = [False]


@contextmanager
def as_runtime() -> Iterator[None]:
    """Let models round rows, and scales of groups, by the runtime's formula in eager."""
    _as_runtime[0] = True
    try:
        yield
    finally:
        _as_runtime[0] = False


def _rounded(x: Tensor, dims: int) -> Tensor:
    """Return a tensor as the runtime quantises it, each row or image by itself."""
    axes = list(range(x.dim() - dims, x.dim()))
    low, high = x.amin(axes, keepdim=True).clamp(max=0), x.amax(axes, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, 1.0, scale)
    zero = torch.clamp(torch.round(-128 - low / scale), -128, 127)
    return (torch.clamp(torch.round(x / scale) + zero, -128, 127) - zero) * scale


def by_tensor(x: Tensor, dims: int = 1) -> Tensor:
    """Return a tensor quantised at run time as dynamic PT2E writes it.

    Args:
        dims: How many of the last dimensions share a scale in the runtime.
    """
    if _as_runtime[0]:
        return _rounded(x, dims)
    scale, zero = qd.choose_qparams.tensor(x, -128, 127, 2.0**-12, torch.int8)
    integers = qd.quantize_per_tensor.tensor(x, scale, zero, *_LIMITS)
    real: Tensor = qd.dequantize_per_tensor.tensor(integers, scale, zero, *_LIMITS)
    return real


def by_row(x: Tensor) -> Tensor:
    """Return a tensor quantised at run time, each row by itself."""
    if _as_runtime[0]:
        return _rounded(x, 1)
    scale, zero = qd.choose_qparams_per_token_asymmetric(x, torch.int8)
    integers = qd.quantize_per_token(x, scale, zero, *_LIMITS)
    real: Tensor = qd.dequantize_per_token(integers, scale, zero, *_LIMITS, torch.float32)
    return real


class IntegerWeight(nn.Module):
    """A weight of integers, dequantised where it is used.

    Args:
        axis: The dimension with a scale for each index, None for one scale.
        group: Elements of a row that share a scale, 0 for none.
        zero: Zero point of all.
    """

    integers: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(
        self,
        *shape: int,
        axis: int | None = 0,
        group: int = 0,
        bits: int = 8,
        zero: int = 0,
        scale: float = 0.01,
    ) -> None:
        super().__init__()
        self.axis, self.group, self.scale, self.zero = axis, group, scale, zero
        self.low, self.high = (-8, 7) if bits == 4 else (-127, 127)
        integers = torch.randint(self.low, self.high + 1, shape, dtype=torch.int8)
        self.register_buffer("integers", integers)
        counts = [shape[0], shape[-1] // group] if group else [shape[axis or 0]]
        self.register_buffer("scales", (torch.rand(counts) + 0.5) * scale)
        self.register_buffer("zeros", torch.full(counts, zero))

    def forward(self) -> Tensor:
        """Return the weight as real numbers."""
        limits = (self.low, self.high, torch.int8)
        real: Tensor
        if self.group:
            scales = self.scales.bfloat16().float() if _as_runtime[0] else self.scales
            real = qd.dequantize_per_channel_group(
                self.integers, scales, self.zeros, *limits, self.group, torch.float32
            )
        elif self.axis is None:
            real = qd.dequantize_per_tensor(self.integers, self.scale, self.zero, *limits)
        else:
            real = qd.dequantize_per_channel(
                self.integers, self.scales, self.zeros, self.axis, *limits
            )
        return real


def case(name: str, functions: Any, *shapes: tuple[int, ...], **more: Any) -> Case:
    """Return a case whose results may be off by a step of ``OUT``."""
    inputs = (torch.randn(shape) * 2 for shape in shapes)
    return plain_case(name, functions, *inputs, **({"tolerance": OUT.scale * 1.001} | more))


def static_cases() -> Iterator[Case]:
    """Yield models on integers whose scales are known ahead of time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(18)
        for group in (
            *(unaries, binaries, products, movers, pools, convolutions, linears, borders),
            weights_alone,
        ):
            yield from group()


def unaries() -> Iterator[Case]:
    names = ("abs", "neg", "exp", "sigmoid", "tanh", "floor", "ceil", "sin", "cos", "square")
    several = torch.tensor([0.25, -0.4, 1.3])
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        **{name: getattr(torch, name) for name in (*names, "relu")},
        **{name: getattr(F, name) for name in ("gelu", "hardswish", "silu", "relu6")},
        "pow2": lambda x: torch.pow(x, 2),
        "elu": lambda x: F.elu(x, 0.7),
        "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
        "clamp": lambda x: torch.clamp(x, -0.7, 1.3),
        "hardtanh": F.hardtanh,
        "prelu": lambda x: F.prelu(x, torch.tensor([0.37])),
        "prelu_zero": lambda x: F.prelu(x, torch.tensor([0.0])),
        "prelu_channels": lambda x: F.prelu(x, several),
        "prelu_lines": lambda x: F.prelu(x[:, :, 0], several),
        "add_number": lambda x: x + 0.37,
        "mul_number": lambda x: x * -1.7,
        "add_itself": lambda x: x + x,
    }
    stepped = {name: lambda x, f=one: OUT(f(IN(x))) for name, one in functions.items()}
    yield case("unary", stepped, (2, 3, 5, 4))
    for name in ("leaky_relu", "prelu_channels", "silu"):
        yield case(f"unary_{name}", stepped[name], (2, 3, 5, 4))
    for positive in (torch.sqrt, torch.log):
        source = Step(0.03, -128)
        yield case(
            f"unary_{positive.__name__}",
            lambda x, f=positive, source=source: OUT(f(source(x.abs() + 0.1))),
            (2, 3, 5, 4),
        )
    fine, steep = Step(0.007, -9), Step(0.01, -128)
    yield case("silu_too_fine", lambda x: fine(F.silu(IN(x))), (2, 5), floats=1)
    yield case("prelu_steep", lambda x: steep(F.prelu(IN(x), 10 * several)), (2, 3, 5),
               tolerance=0.01001)  # fmt: skip


def binaries() -> Iterator[Case]:
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        **{name: getattr(torch, name) for name in ("add", "sub", "mul", "maximum", "minimum")},
        "add_relu": lambda x, y: F.relu(x + y),
        "div": lambda x, y: x / (y.abs() + 1),
    }
    stepped = {name: lambda x, y, f=f: OUT(f(IN(x), OTHER(y))) for name, f in functions.items()}
    yield case("binary", stepped, (2, 3, 4, 5), (3, 1, 5), floats=2)
    yield case("binary_add", stepped["add"], (2, 7), (2, 7))
    weight = IntegerWeight(3, 1, 1, axis=None, scale=0.02)
    yield case("add_constant", lambda x, w: OUT(IN(x) + w()), (2, 3, 4, 4), parts=(weight,))
    joined = {
        "same": lambda x, y: IN(torch.cat([IN(x), IN(y)], 1)),
        "other": lambda x, y: OUT(torch.cat([IN(x), OTHER(y)], 1)),
        "stack": lambda x, y: OUT(torch.stack([IN(x), OTHER(y)])),
    }
    yield case("cat", joined, (2, 3, 4, 4), (2, 3, 4, 4))


def products() -> Iterator[Case]:
    even = Step(0.02)
    for name, shapes in {
        "batches": ((2, 3, 5), (2, 5, 4)),
        "heads": ((2, 3, 4, 5), (2, 3, 5, 4)),
        "broadcast": ((2, 3, 4, 5), (5, 4)),
        "matrices": ((3, 5), (5, 4)),
    }.items():
        functions = {
            "plain": lambda x, y: OUT(IN(x) @ even(y)),
            "relu": lambda x, y: OUT(F.relu(IN(x) @ even(y))),
        }
        yield case(f"product_of_{name}", functions, *shapes)
    yield case("product_turned", lambda x, y: OUT(IN(x) @ even(y).mT), (2, 3, 5), (2, 4, 5))
    yield case("product_of_itself", lambda x: OUT(even(x) @ even(x)), (2, 5, 5))
    yield case("product_moved", lambda x, y: OUT(IN(x) @ OTHER(y)), (2, 3, 5), (2, 5, 4), floats=1)
    coarse, fine = Step(2.0), Step(0.0004)
    yield case(
        *("product_too_coarse", lambda x, y: fine(coarse(x) @ coarse(y)), (2, 3, 5), (2, 5, 4)),
        floats=1,
        tolerance=0.00041,
    )


def movers() -> Iterator[Case]:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "view": lambda x: x.view(2, -1),
        "permute": lambda x: x.permute(0, 2, 3, 1),
        "transpose": lambda x: x.transpose(1, 3),
        "slice": lambda x: x[:, 1:, :, 2:],
        "select": lambda x: x[:, 1],
        "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
        "squeeze": lambda x: x[:, :1].squeeze(1),
        "flatten": lambda x: x.flatten(1),
        "chunks": lambda x: x.chunk(2, 3)[1],
    }
    for step, name in ((IN, "same"), (OUT, "other")):
        moved = {key: lambda x, f=f, step=step: step(f(IN(x))) for key, f in functions.items()}
        yield case(f"move_{name}", moved, (2, 3, 5, 6))
        yield case(f"move_{name}_pad", moved["pad"], (2, 3, 5, 6))
    fine, coarse = Step(0.0004, 3), Step(0.6, 1)
    yield case("rescaled_finer", lambda x: fine(coarse(x)), (2, 30), tolerance=0.0005)
    yield case("rescaled_coarser", lambda x: coarse(fine(x)), (2, 30), tolerance=0.61)


def pools() -> Iterator[Case]:
    functions: dict[str, Any] = {
        "max": lambda x: IN(F.max_pool2d(IN(x), 2)),
        "max_other": lambda x: OUT(F.max_pool2d(IN(x), 3, 2, 1)),
        "max_relu": lambda x: IN(F.relu(F.max_pool2d(IN(x), 2))),
        "max_1d": lambda x: IN(F.max_pool1d(IN(x)[0], 2)),
        "adaptive": lambda x: OUT(F.adaptive_avg_pool2d(IN(x), 1)),
        "adaptive_1d": lambda x: OUT(F.adaptive_avg_pool1d(IN(x)[:, 0], 1)),
        "mean_of_lines": lambda x: OUT(IN(x)[0].mean(-1)),
        "amax": lambda x: OUT(IN(x).amax([2, 3], keepdim=True)),
        "amax_row": lambda x: OUT(IN(x).amax(-1)),
        "resize": lambda x: IN(F.interpolate(IN(x), scale_factor=2.0, mode="bilinear")),
    }
    for dims in ((-1,), (1,), (0,), (2,), (2, 3), (0, 1, 2, 3)):
        for keep in (False, True):
            functions[f"mean_{dims}_{keep}"] = lambda x, d=dims, k=keep: OUT(IN(x).mean(d, k))
    yield case("pool", functions, (2, 3, 8, 9))
    yield case("pool_max_relu", functions["max_relu"], (2, 3, 8, 9))
    yield case("mean", functions["mean_(2, 3)_False"], (2, 3, 8, 9))
    in_float = {
        "max_clamp": lambda x: OUT(F.hardtanh(F.max_pool2d(IN(x), 2))),
        "avg": lambda x: OUT(F.avg_pool2d(IN(x), 2)),
        "avg_1d": lambda x: OUT(F.avg_pool1d(IN(x)[0], 2)),
        "mean_apart": lambda x: OUT(IN(x).mean((0, 3))),
        "mean_of_two": lambda x: OUT(IN(x).mean((0, 2))),
        "resize_other": lambda x: OUT(F.interpolate(IN(x), scale_factor=2.0, mode="bilinear")),
    }
    yield case("pool_in_float", in_float, (2, 3, 8, 9), floats=6)
    weight = {"parts": (IntegerWeight(4, 3, 3, 3),)}
    means = {
        "channels_last": lambda x, w: OUT(OUT(F.conv2d(IN(x), w())).mean((0, 2), keepdim=True)),
        "height": lambda x, w: OUT(OUT(F.conv2d(IN(x), w())).mean(2)),
    }
    yield case("mean_after_conv", means, (2, 3, 8, 9), **weight)


def layers_of(
    layer: Any, forms: dict[str, tuple[tuple[int, ...], dict[str, Any]]], axis: int | None
) -> tuple[dict[str, Any], list[IntegerWeight]]:
    """Return functions that each call a layer with its own weight and bias, and the weights."""
    weights = [IntegerWeight(*shape, axis=axis) for shape, _ in forms.values()]
    functions: dict[str, Any] = {}
    for number, (name, (shape, options)) in enumerate(forms.items()):
        bias = torch.randn(shape[0])

        def plain(x: Tensor, *w: Any, n: int = number, b: Any = bias, o: Any = options) -> Tensor:
            return OUT(layer(IN(x), w[n](), b, **o))

        def relu(x: Tensor, *w: Any, n: int = number, b: Any = bias, o: Any = options) -> Tensor:
            return OUT(torch.relu(layer(IN(x), w[n](), b, **o)))

        functions |= {name: plain, f"{name}_relu": relu}
    return functions, weights


IMAGES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((6, 5, 3, 3), {"padding": 1}),
    "strided": ((6, 5, 3, 2), {"stride": 2, "padding": (0, 1)}),
    "dilated": ((7, 5, 3, 3), {"dilation": 2}),
    "point": ((8, 5, 1, 1), {}),
    "depthwise": ((5, 1, 3, 3), {"groups": 5, "padding": 1}),
    "multiplied": ((10, 1, 3, 3), {"groups": 5}),
}
VOLUMES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((6, 4, 3, 3, 3), {}),
    "padded": ((6, 4, 3, 3, 2), {"padding": (1, 0, 1)}),
    "strided": ((6, 4, 2, 3, 3), {"stride": (2, 2, 1), "padding": 1}),
    "dilated": ((6, 4, 2, 2, 2), {"dilation": (2, 1, 2)}),
    "grouped": ((6, 2, 3, 3, 3), {"groups": 2, "padding": (2, 0, 0)}),
    "point": ((6, 4, 1, 1, 1), {}),
}


def convolutions() -> Iterator[Case]:
    for axis in (None, 0):
        of = "tensor" if axis is None else "channels"
        for layer, forms, shape in (
            (F.conv2d, IMAGES, (2, 5, 9, 8)),
            (F.conv3d, VOLUMES, (2, 4, 5, 7, 6)),
        ):
            functions, weights = layers_of(layer, forms, axis)
            yield case(f"{layer.__name__}_{of}", functions, shape, parts=weights)
        wide, bias = IntegerWeight(64, 4, 3, axis=axis), torch.randn(64)

        def parted(x: Tensor, w: Any, bias: Tensor = bias) -> tuple[Tensor, ...]:
            result = OUT(F.conv1d(IN(F.pad(IN(x), (2, 0))), w(), bias))
            return tuple(OUT(part) for part in result.chunk(2, 1))

        yield case(f"conv1d_padded_parted_{of}", parted, (2, 4, 11), parts=(wide,))
    singles: tuple[tuple[str, Any, IntegerWeight, tuple[int, ...]], ...] = (
        ("conv_one", F.conv2d, IntegerWeight(1, 1, 1, 1), (2, 1, 4, 4)),
        ("conv1d", F.conv1d, IntegerWeight(6, 4, 3), (2, 4, 11)),
        ("conv_zero_points", F.conv2d, IntegerWeight(6, 4, 3, 3, bits=4, zero=3), (2, 4, 6, 6)),
    )
    for name, layer, weight, sizes in singles:
        yield case(name, lambda x, w, f=layer: OUT(f(IN(x), w())), sizes, parts=(weight,))
    yield case("conv_grouped", lambda x, w: OUT(F.conv2d(IN(x), w(), groups=2)), (1, 4, 7, 7),
               parts=(IntegerWeight(6, 2, 3, 3),))  # fmt: skip
    for groups in (1, 2):

        def turned(x: Tensor, w: Any, groups: int = groups) -> Tensor:
            return OUT(F.conv_transpose2d(IN(x), w(), None, 2, 0, 1, groups))

        weight = IntegerWeight(4, 3, 3, 3, axis=1)
        yield case(f"conv_transpose_{groups}", turned, (2, 4, 5, 6), parts=(weight,))


def linears() -> Iterator[Case]:
    for axis in (None, 0):
        for bits in (8, 4):
            for width in (7, 16, 33):
                weight = IntegerWeight(5, width, axis=axis, bits=bits, scale=0.02)
                bias = torch.randn(5)
                yield case(
                    f"linear_{'tensor' if axis is None else 'channels'}_{bits}_{width}",
                    lambda x, w, bias=bias: OUT(F.linear(IN(x), w(), bias)),
                    (2, 3, width),
                    parts=(weight,),
                )
    weights = {"parts": (IntegerWeight(5, 16), IntegerWeight(5, 16, zero=100))}
    forms = {
        "addmm": lambda x, w, _: OUT(torch.addmm(torch.ones(5), IN(x), w().t())),
        "mm": lambda x, w, _: OUT(torch.mm(IN(x), w().t())),
        "relu": lambda x, w, _: OUT(F.relu(F.linear(IN(x), w()))),
        "far_zero_points": lambda x, _, w: OUT(F.linear(IN(x), w())),
        "view": lambda x, w, _: OUT(torch.mm(IN(x).view(6, 16), w().t()).view(2, 3, 5).mT),
    }
    yield case("linear", forms, (6, 16), **weights)
    yield case("linear_floats_out", lambda x, w, _: F.linear(IN(x), w()), (3, 16), floats=1,
               tolerance=1e-5, **weights)  # fmt: skip
    fine = Step(0.0004)
    yield case("linear_too_coarse", lambda x, w: fine(F.linear(IN(x), w())), (3, 16),
               parts=(IntegerWeight(5, 16, scale=4.0),), tolerance=0.00041)  # fmt: skip


def borders() -> Iterator[Case]:
    weight = IntegerWeight(5, 3, 3, 3)

    def conv(x: Tensor, w: Any) -> Tensor:
        return OUT.quantize(F.conv2d(IN.dequantize(x), w(), padding=1))

    x = torch.randint(-128, 128, (2, 3, 4, 4), dtype=torch.int8)
    for name, one in (("", x), ("_last", x.to(memory_format=torch.channels_last))):
        yield plain_case(f"integers{name}", conv, one, parts=(weight,), tolerance=1)
    yield case("int8_and_float_readers", lambda x: (IN(x) + 1).sin() + IN(x).softmax(-1), (2, 5),
               tolerance=1e-5, floats=2)  # fmt: skip
    yield case("softmax_between", lambda x: OUT(IN(x).softmax(-1)), (2, 5), floats=1)
    yield case("two_results", lambda x: (OUT(IN(x) * 2), OTHER(IN(x).sigmoid())), (2, 5))


def weights_alone() -> Iterator[Case]:
    kinds: dict[str, dict[str, Any]] = {
        "int8": {},
        "int8_tensor": {"axis": None},
        "int8_zero_points": {"zero": 100},
        "int4": {"bits": 4},
        "int4_group": {"bits": 4, "group": 32},
    }
    for kind, options in kinds.items():
        width, bias = 64 if "group" in kind else 7, torch.randn(5)
        yield case(
            f"weight_only_{kind}",
            lambda x, w, bias=bias: torch.relu(F.linear(x, w(), bias)),
            (2, 3, width),
            parts=(IntegerWeight(5, width, **options),),
            floats=int("group" in kind),
            tolerance=1e-4,
        )
    yield case("weight_only_conv", lambda x, w: F.conv2d(x, w()), (2, 4, 7, 7),
               parts=(IntegerWeight(6, 4, 3, 3),), floats=1, tolerance=1e-4)  # fmt: skip


def run_time_cases() -> Iterator[Case]:
    """Yield models whose inputs are quantised at run time, by tensor or by row."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(81)
        yield from run_time_linears()
        yield from run_time_convolutions()


def run_time_linears() -> Iterator[Case]:
    kinds: dict[str, dict[str, Any]] = {
        "int8": {},
        "int8_tensor": {"axis": None},
        "int8_zero_points": {"zero": 5, "bits": 4},
        "int4": {"bits": 4},
        **{f"int4_group_{group}": {"bits": 4, "group": group} for group in (32, 64, 128)},
    }
    roundings: dict[str, Any] = {"row": by_row, "tensor": by_tensor}
    for how, rounding in roundings.items():
        for kind, options in kinds.items():
            for width in (128,) if "group" in kind else (16, 7):
                bias = torch.randn(64)
                forms: dict[str, Any] = {
                    "plain": lambda x, w, b=bias, r=rounding: F.linear(r(x), w(), b),
                    "relu": lambda x, w, b=bias, r=rounding: F.linear(r(x), w(), b).relu(),
                    "parted": lambda x, w, b=bias, r=rounding: F.glu(F.linear(r(x), w(), b)),
                }
                if "group" not in kind:
                    forms["mm"] = lambda x, w, r=rounding: torch.mm(r(x[0]), w().t())
                weight = IntegerWeight(64, width, **options)
                yield plain_case(f"{how}_{kind}_{width}", forms, (2, 3, width), parts=(weight,))


def run_time_convolutions() -> Iterator[Case]:
    for name, shape, axis, layer in (
        ("plain", (6, 4, 3, 3), 0, lambda x, w: F.conv2d(x, w, padding=1)),
        ("strided", (6, 4, 3, 3), 0, lambda x, w: torch.relu(F.conv2d(x, w, stride=2))),
        ("grouped", (6, 2, 3, 3), 0, lambda x, w: F.conv2d(x, w, groups=2)),
        ("depthwise", (8, 1, 3, 3), 0, lambda x, w: F.conv2d(x, w, groups=4)),
        ("transposed", (4, 3, 3, 3), 1, lambda x, w: F.conv_transpose2d(x, w, stride=2)),
        ("groups", (4, 3, 3, 3), 1, lambda x, w: F.conv_transpose2d(x, w, stride=2, groups=2)),
    ):
        yield plain_case(
            f"conv_{name}",
            lambda x, w, layer=layer: layer(by_tensor(x, 3), w()),
            *((2, 4, 7, 6),),
            parts=(IntegerWeight(*shape, axis=axis),),
            tolerance=1e-4,
        )
    line = {"parts": (IntegerWeight(6, 4, 3),), "tolerance": 1e-4}
    yield plain_case("conv_1d", lambda x, w: F.conv1d(by_tensor(x, 2), w()), (2, 4, 9), **line)
