"""Small quantised models, written as PT2E and torchao write them, with inputs for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from xnnpack_cases import Function  # type: ignore[import-not-found]

# torch's own; importing it makes the operators known
importlib.import_module("torch.ao.quantization.fx._decomposed")
Tensor = torch.Tensor
qd = torch.ops.quantized_decomposed


@dataclass(frozen=True)
class Step:
    """One scale and zero point."""

    scale: float
    zero: int = 0

    def quantize(self, x: Tensor) -> Tensor:
        """Return 8-bit integers."""
        found: Tensor = qd.quantize_per_tensor(x, self.scale, self.zero, -128, 127, torch.int8)
        return found

    def dequantize(self, x: Tensor) -> Tensor:
        """Return real numbers."""
        found: Tensor = qd.dequantize_per_tensor(x, self.scale, self.zero, -128, 127, torch.int8)
        return found

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor rounded to the integers and back."""
        return self.dequantize(self.quantize(x))


IN, OTHER, OUT = Step(0.03, 5), Step(0.021, -17), Step(0.05, -9)


class IntegerWeight(nn.Module):
    """A weight of integers, dequantised where it is used.

    Args:
        shape: Its sizes.
        axis: The dimension with a scale for each index, None for one scale.
        group: Elements of a row that share a scale, 0 for none.
        bits: 4 or 8.
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
        found: Tensor
        if self.group:
            found = qd.dequantize_per_channel_group(
                self.integers, self.scales, self.zeros, *limits, self.group, torch.float32
            )
        elif self.axis is None:
            found = qd.dequantize_per_tensor(self.integers, self.scale, self.zero, *limits)
        else:
            found = qd.dequantize_per_channel(
                self.integers, self.scales, self.zeros, self.axis, *limits
            )
        return found


@dataclass(frozen=True)
class QuantizedCase:
    """One model.

    Attributes:
        name: What it shows.
        model: The model in evaluation mode.
        inputs: Its inputs.
        step: The largest allowed difference from eager: one step of the result's integers.
        floats: Nodes that read integers and are known to compute floats.
    """

    name: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    step: float = OUT.scale * 1.001
    floats: int = 0


def case(
    name: str, function: Callable[..., Any], *shapes: tuple[int, ...], parts: Any = (), **more: Any
) -> QuantizedCase:
    inputs = tuple(torch.randn(shape) * 2 for shape in shapes)
    return QuantizedCase(name, Function(function, *parts).eval(), inputs, **more)


def static_cases() -> Iterator[QuantizedCase]:
    """Yield models on integers whose scales are known ahead of time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(18)
        for group in (
            unaries,
            binaries,
            slopes,
            products,
            movers,
            pools,
            convolutions,
            linears,
            borders,
        ):
            yield from group()


_UNARIES: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in ("abs", "neg", "exp", "sigmoid", "tanh", "floor", "ceil", "sin", "cos")
    },
    "square": torch.square,
    "pow2": lambda x: torch.pow(x, 2),
    "sqrt": torch.sqrt,
    "gelu": F.gelu,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "elu": lambda x: F.elu(x, 0.7),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "relu": torch.relu,
    "relu6": F.relu6,
    "clamp": lambda x: torch.clamp(x, -0.7, 1.3),
    "hardtanh": F.hardtanh,
    "log": torch.log,
}


def unaries() -> Iterator[QuantizedCase]:
    for name, function in _UNARIES.items():
        positive = name in ("sqrt", "log")
        source = Step(0.03, -128) if positive else IN
        offset = 0.1 if positive else 0.0

        def call(
            x: Tensor, function: Any = function, source: Step = source, offset: float = offset
        ) -> Tensor:
            return OUT(function(source(x.abs() + offset if offset else x)))

        yield case(f"unary_{name}", call, (2, 3, 5, 4))


def binaries() -> Iterator[QuantizedCase]:
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "maximum": torch.maximum,
        "minimum": torch.minimum,
        "div": lambda x, y: x / (y.abs() + 1),
    }
    for name, function in functions.items():

        def call(x: Tensor, y: Tensor, function: Any = function) -> Tensor:
            return OUT(function(IN(x), OTHER(y)))

        floats = 2 if name == "div" else 0
        shapes = ((2, 3, 4, 5), (3, 1, 5))
        yield case(f"binary_{name}", call, *shapes, floats=floats)
    yield case("add_relu", lambda x, y: OUT(F.relu(IN(x) + OTHER(y))), (2, 7), (2, 7))
    yield case("add_number", lambda x: OUT(IN(x) + 0.37), (2, 7))
    yield case("mul_number", lambda x: OUT(IN(x) * -1.7), (2, 7))
    yield case("add_itself", lambda x: OUT(IN(x) + IN(x)), (2, 7))
    for axis in (1, -1):
        yield case(f"glu_{axis}", lambda x, axis=axis: OUT(F.glu(IN(x), axis)), (2, 4, 3, 6))
    yield case("glu_too_fine", lambda x: Step(0.007, -9)(F.glu(IN(x))), (2, 6), floats=1)
    weight = IntegerWeight(3, 1, 1, axis=None, scale=0.02)
    yield case("add_constant", lambda x, w: OUT(IN(x) + w()), (2, 3, 4, 4), parts=(weight,))


def slopes() -> Iterator[QuantizedCase]:
    single, several = torch.tensor([0.37]), torch.tensor([0.25, -0.4, 1.3])
    yield case("prelu", lambda x: OUT(F.prelu(IN(x), single)), (2, 3, 4, 5))
    yield case("prelu_channels", lambda x: OUT(F.prelu(IN(x), several)), (2, 3, 4, 5))
    yield case("prelu_lines", lambda x: OUT(F.prelu(IN(x), several)), (2, 3, 5))
    yield case("prelu_zero", lambda x: OUT(F.prelu(IN(x), single * 0)), (2, 3, 5))
    steep = Step(0.01, -128)
    yield case(
        "prelu_steep",
        lambda x: steep(F.prelu(IN(x), 10 * several)),
        (2, 3, 5),
        step=0.01001,
    )
    unit = Step(1 / 255, -128)
    yield case("hardsigmoid", lambda x: unit(F.hardsigmoid(IN(x))), (4, 9), step=1.001 / 255)
    yield case("hardsigmoid_coarse", lambda x: OUT(F.hardsigmoid(OTHER(x))), (4, 9))
    wide = Step(0.06, 3)
    yield case(
        "hardsigmoid_wide", lambda x: unit(F.hardsigmoid(wide(3 * x))), (40, 9), step=1.001 / 255
    )
    fine = Step(0.001)
    yield case(
        "hardsigmoid_fine", lambda x: fine(F.hardsigmoid(IN(x))), (4, 9), floats=1, step=0.00101
    )


def products() -> Iterator[QuantizedCase]:
    even = Step(0.02)
    for name, shapes in {
        "batches": ((2, 3, 5), (2, 5, 4)),
        "heads": ((2, 3, 4, 5), (2, 3, 5, 4)),
        "broadcast": ((2, 3, 4, 5), (5, 4)),
        "matrices": ((3, 5), (5, 4)),
    }.items():
        yield case(f"product_of_{name}", lambda x, y: OUT(IN(x) @ even(y)), *shapes)
    yield case("product_relu", lambda x, y: OUT(F.relu(IN(x) @ even(y))), (2, 3, 5), (2, 5, 4))
    yield case("product_turned", lambda x, y: OUT(IN(x) @ even(y).mT), (2, 3, 5), (2, 4, 5))
    yield case("product_of_itself", lambda x: OUT(even(x) @ even(x)), (2, 5, 5))
    yield case("product_moved", lambda x, y: OUT(IN(x) @ OTHER(y)), (2, 3, 5), (2, 5, 4), floats=1)
    coarse, fine = Step(2.0), Step(0.0004)
    yield case(
        "product_too_coarse",
        lambda x, y: fine(coarse(x) @ coarse(y)),
        *((2, 3, 5), (2, 5, 4)),
        floats=1,
        step=0.00041,
    )


def movers() -> Iterator[QuantizedCase]:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "view": lambda x: x.view(2, -1),
        "permute": lambda x: x.permute(0, 2, 3, 1),
        "transpose": lambda x: x.transpose(1, 3),
        "slice": lambda x: x[:, 1:, :, 2:],
        "select": lambda x: x[:, 1],
        "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
        "squeeze": lambda x: x[:, :1].squeeze(1),
        "flatten": lambda x: x.flatten(1),
    }
    for name, function in functions.items():

        def same(x: Tensor, function: Any = function) -> Tensor:
            return IN(function(IN(x)))

        def other(x: Tensor, function: Any = function) -> Tensor:
            return OUT(function(IN(x)))

        yield case(f"move_{name}", same, (2, 3, 5, 6))
        yield case(f"move_{name}_other", other, (2, 3, 5, 6))
    yield case("cat", lambda x, y: IN(torch.cat([IN(x), IN(y)], 1)), (2, 3, 4, 4), (2, 2, 4, 4))
    yield case(
        "cat_other", lambda x, y: OUT(torch.cat([IN(x), OTHER(y)], 1)), (2, 3, 4, 4), (2, 2, 4, 4)
    )
    yield case("stack", lambda x, y: OUT(torch.stack([IN(x), OTHER(y)])), (2, 3), (2, 3))
    yield case("chunks", lambda x: OUT(IN(x).chunk(2, 1)[1]), (2, 4, 3))
    fine, coarse = Step(0.0004, 3), Step(0.6, 1)
    yield case("rescaled_finer", lambda x: fine(coarse(x)), (2, 30), step=0.0005)
    yield case("rescaled_coarser", lambda x: coarse(fine(x)), (2, 30), step=0.61)


def pools() -> Iterator[QuantizedCase]:
    image = (2, 3, 8, 9)
    yield case("max_pool", lambda x: IN(F.max_pool2d(IN(x), 2)), image)
    yield case("max_pool_other", lambda x: OUT(F.max_pool2d(IN(x), 3, 2, 1)), image)
    yield case("max_pool_relu", lambda x: IN(F.relu(F.max_pool2d(IN(x), 2))), image)
    yield case(
        "max_pool_clamp", lambda x: OUT(F.hardtanh(F.max_pool2d(IN(x), 2))), image, floats=1
    )
    yield case("avg_pool", lambda x: OUT(F.avg_pool2d(IN(x), 2)), image, floats=1)
    yield case("mean", lambda x: OUT(IN(x).mean([2, 3])), image)
    yield case("mean_kept", lambda x: OUT(IN(x).mean([2, 3], keepdim=True)), image)
    yield case("adaptive", lambda x: OUT(F.adaptive_avg_pool2d(IN(x), 1)), image)
    for name, dims in {
        "last": (-1,),
        "channels": (1,),
        "images": (0,),
        "height": (2,),
        "all": (0, 1, 2, 3),
        "apart": (0, 3),
        "images_and_height": (0, 2),
    }.items():
        for keep in (False, True):
            yield case(
                f"mean_{name}_{keep}",
                lambda x, d=dims, k=keep: OUT(IN(x).mean(d, keepdim=k)),
                image,
                floats=int(name == "apart" or (name == "images_and_height" and not keep)),
            )
    yield case("mean_of_lines", lambda x: OUT(IN(x).mean(-1)), (2, 5, 7))
    weight = IntegerWeight(4, 3, 3, 3)
    yield case(
        "mean_of_channels_last",
        lambda x, w: OUT(OUT(F.conv2d(IN(x), w())).mean((0, 2), keepdim=True)),
        image,
        parts=(weight,),
    )
    yield case(
        "mean_of_height",
        lambda x, w: OUT(OUT(F.conv2d(IN(x), w())).mean(2)),
        image,
        parts=(weight,),
    )
    yield case("avg_pool1d", lambda x: OUT(F.avg_pool1d(IN(x), 2)), (2, 3, 8), floats=1)
    yield case("max_pool1d", lambda x: IN(F.max_pool1d(IN(x), 2)), (2, 3, 8))
    yield case("adaptive_line", lambda x: OUT(F.adaptive_avg_pool1d(IN(x), 1)), (2, 3, 8))
    yield case("amax_row", lambda x: OUT(IN(x).amax(-1)), (2, 3, 8))
    yield case("amax", lambda x: OUT(IN(x).amax([2, 3], keepdim=True)), image)
    yield case(
        "resize",
        lambda x: IN(F.interpolate(IN(x), scale_factor=2.0, mode="bilinear")),
        image,
        step=IN.scale * 1.001,
    )
    yield case(
        "resize_other",
        lambda x: OUT(F.interpolate(IN(x), scale_factor=2.0, mode="bilinear")),
        image,
        floats=1,
    )


def convolutions() -> Iterator[QuantizedCase]:
    shapes: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
        "plain": ((6, 5, 3, 3), {"padding": 1}),
        "strided": ((6, 5, 3, 2), {"stride": 2, "padding": (0, 1)}),
        "dilated": ((7, 5, 3, 3), {"dilation": 2}),
        "point": ((8, 5, 1, 1), {}),
        "depthwise": ((5, 1, 3, 3), {"groups": 5, "padding": 1}),
        "multiplied": ((10, 1, 3, 3), {"groups": 5}),
    }
    for axis in (None, 0):
        for name, (shape, options) in shapes.items():
            for relu in (False, True):
                weight, bias = IntegerWeight(*shape, axis=axis), torch.randn(shape[0])

                def call(
                    x: Tensor, w: Any, relu: bool = relu, bias: Any = bias, options: Any = options
                ) -> Tensor:
                    y = F.conv2d(IN(x), w(), bias, **options)
                    return OUT(torch.relu(y) if relu else y)

                more = "_relu" * relu + ("_channels" if axis == 0 else "")
                yield case(f"conv_{name}{more}", call, (2, 5, 9, 8), parts=(weight,))
    grouped = IntegerWeight(6, 2, 3, 3)
    yield case(
        "conv_grouped",
        lambda x, w: OUT(F.conv2d(IN(x), w(), groups=2)),
        (1, 4, 7, 7),
        parts=(grouped,),
    )
    line = IntegerWeight(6, 4, 3)
    yield case("conv1d", lambda x, w: OUT(F.conv1d(IN(x), w())), (2, 4, 11), parts=(line,))
    for name, sizes, options in (
        ("plain", (6, 4, 3, 3, 3), {}),
        ("padded", (6, 4, 3, 3, 2), {"padding": (1, 0, 1)}),
        ("strided", (6, 4, 2, 3, 3), {"stride": (2, 2, 1), "padding": 1}),
        ("dilated", (6, 4, 2, 2, 2), {"dilation": (2, 1, 2)}),
        ("grouped", (6, 2, 3, 3, 3), {"groups": 2, "padding": (2, 0, 0)}),
        ("point", (6, 4, 1, 1, 1), {}),
    ):
        for axis in (None, 0):
            volume, bias = IntegerWeight(*sizes, axis=axis), torch.randn(6)
            yield case(
                f"conv3d_{name}{'' if axis is None else '_channels'}",
                lambda x, w, bias=bias, options=options: OUT(
                    torch.relu(F.conv3d(IN(x), w(), bias, **options))
                ),
                (2, 4, 5, 7, 6),
                parts=(volume,),
            )
    for axis in (None, 0):
        wide, bias = IntegerWeight(64, 4, 3, axis=axis), torch.randn(64)
        yield case(
            f"conv1d_padded_parted{'' if axis is None else '_channels'}",
            lambda x, w, bias=bias: tuple(
                OUT(part)
                for part in OUT(F.conv1d(IN(F.pad(IN(x), (2, 0))), w(), bias)).chunk(2, 1)
            ),
            (2, 4, 11),
            parts=(wide,),
        )
    single = IntegerWeight(1, 1, 1, 1)
    yield case("conv_one", lambda x, w: OUT(F.conv2d(IN(x), w())), (2, 1, 4, 4), parts=(single,))
    for groups in (1, 2):
        turned = IntegerWeight(4, 3, 3, 3, axis=1)
        yield case(
            f"conv_transpose_{groups}",
            lambda x, w, groups=groups: OUT(
                F.conv_transpose2d(IN(x), w(), stride=2, output_padding=1, groups=groups)
            ),
            (2, 4, 5, 6),
            parts=(turned,),
        )
    moved = IntegerWeight(6, 4, 3, 3, bits=4, zero=3)
    yield case(
        "conv_zero_points", lambda x, w: OUT(F.conv2d(IN(x), w())), (2, 4, 6, 6), parts=(moved,)
    )


def linears() -> Iterator[QuantizedCase]:
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
    weight = IntegerWeight(5, 16)
    bias = torch.randn(5)
    yield case(
        "addmm", lambda x, w: OUT(torch.addmm(bias, IN(x), w().t())), (3, 16), parts=(weight,)
    )
    yield case("mm", lambda x, w: OUT(torch.mm(IN(x), w().t())), (3, 16), parts=(weight,))
    yield case(
        "linear_relu", lambda x, w: OUT(F.relu(F.linear(IN(x), w()))), (3, 16), parts=(weight,)
    )
    yield case(
        "linear_decomposed",
        lambda x, w: OUT(torch.mm(IN(x).view(6, 16), w().t()).view(2, 3, 5).permute(0, 2, 1)),
        (2, 3, 16),
        parts=(weight,),
    )
    heavy = IntegerWeight(5, 16, scale=4.0)
    fine = Step(0.0004)
    yield case(
        "linear_too_coarse",
        lambda x, w: fine(F.linear(IN(x), w())),
        (3, 16),
        parts=(heavy,),
        step=0.00041,
    )
    moved = IntegerWeight(5, 16, zero=100)
    yield case(
        "linear_far_zero_points",
        lambda x, w: OUT(F.linear(IN(x), w())),
        (3, 16),
        parts=(moved,),
    )
    yield case(
        "linear_floats_out",
        lambda x, w: F.linear(IN(x), w()),
        (3, 16),
        parts=(weight,),
        floats=1,
        step=1e-5,
    )


def borders() -> Iterator[QuantizedCase]:
    x = torch.randint(-128, 128, (2, 3, 4, 4), dtype=torch.int8)
    weight = IntegerWeight(5, 3, 3, 3)
    yield QuantizedCase(
        "integers_in_and_out",
        Function(lambda x, w: OUT.quantize(F.conv2d(IN.dequantize(x), w())), weight),
        (x,),
        step=1,
    )
    yield QuantizedCase(
        "integers_channels_last",
        Function(lambda x, w: OUT.quantize(F.conv2d(IN.dequantize(x), w(), padding=1)), weight),
        (x.to(memory_format=torch.channels_last),),
        step=1,
    )
    yield case(
        "int8_and_float_readers",
        lambda x: (IN(x) + 1).sin() + IN(x).softmax(-1),
        (2, 5),
        step=1e-5,
        floats=2,
    )
    yield case("softmax_between", lambda x: OUT(IN(x).softmax(-1)), (2, 5), floats=1)
    yield case("silu_too_fine", lambda x: Step(0.007, -9)(F.silu(IN(x))), (2, 5), floats=1)
    yield case("two_results", lambda x: (OUT(IN(x) * 2), OTHER(IN(x).sigmoid())), (2, 5))


def rounded(x: Tensor, dims: int = 1) -> Tensor:
    """Return a tensor as the runtime quantises it at run time, each row or image by itself."""
    axes = list(range(x.dim() - dims, x.dim()))
    low, high = x.amin(axes, keepdim=True).clamp(max=0), x.amax(axes, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, 1.0, scale)
    zero = torch.clamp(torch.round(-128 - low / scale), -128, 127)
    return (torch.clamp(torch.round(x / scale) + zero, -128, 127) - zero) * scale


def by_tensor(x: Tensor) -> Tensor:
    """Return a tensor quantised at run time as dynamic PT2E writes it."""
    scale, zero = qd.choose_qparams.tensor(x, -128, 127, 2.0**-12, torch.int8)
    found = qd.quantize_per_tensor.tensor(x, scale, zero, -128, 127, torch.int8)
    real: Tensor = qd.dequantize_per_tensor.tensor(found, scale, zero, -128, 127, torch.int8)
    return real


def by_row(x: Tensor) -> Tensor:
    """Return a tensor quantised at run time, each row by itself."""
    scale, zero = qd.choose_qparams_per_token_asymmetric(x, torch.int8)
    found = qd.quantize_per_token(x, scale, zero, -128, 127, torch.int8)
    real: Tensor = qd.dequantize_per_token(
        found, scale, zero, -128, 127, torch.int8, torch.float32
    )
    return real


def run_time_cases() -> Iterator[QuantizedCase]:
    """Yield models whose inputs are quantised at run time, and ones with integer weights alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(81)
        yield from run_time_linears()
        yield from run_time_convolutions()
        yield from weights_alone()


class AsRuntime(nn.Module):
    """A model that quantises at run time, and the same as the runtime's formula has it.

    Args:
        rounding: What the program says: ``by_row`` or ``by_tensor``.
        layer: The rest, given the rounded input and the weight.
        weight: The weight.
        dims: How many of the last dimensions share a scale in the runtime.
    """

    def __init__(
        self,
        rounding: Callable[[Tensor], Tensor],
        layer: Callable[[Tensor, Tensor], Tensor],
        weight: IntegerWeight,
        dims: int = 1,
    ) -> None:
        super().__init__()
        self.rounding, self.layer, self.weight, self.dims = rounding, layer, weight, dims

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.rounding(x), self.weight())

    def expected(self, x: Tensor) -> Tensor:
        """Return what the runtime should compute."""
        weight: Tensor = self.weight()
        if self.weight.group:
            scales = self.weight.scales.to(torch.bfloat16).float()
            each = scales.repeat_interleave(self.weight.group, 1)
            weight = (self.weight.integers.float() - self.weight.zero) * each
        return self.layer(rounded(x, self.dims), weight)


def run_time_linears() -> Iterator[QuantizedCase]:
    kinds: dict[str, dict[str, Any]] = {
        "int8": {},
        "int8_tensor": {"axis": None},
        "int8_zero_points": {"zero": 5, "bits": 4},
        "int4": {"bits": 4},
        **{f"int4_group_{group}": {"bits": 4, "group": group} for group in (32, 64, 128)},
    }
    for rounding in (by_row, by_tensor):
        for name, options in kinds.items():
            for width in (128,) if "group" in name else (16, 7):
                for relu in (False, True):
                    bias = torch.randn(5)

                    def layer(
                        x: Tensor, w: Tensor, relu: bool = relu, bias: Tensor = bias
                    ) -> Tensor:
                        y = F.linear(x, w, bias)
                        return torch.relu(y) if relu else y

                    model = AsRuntime(rounding, layer, IntegerWeight(5, width, **options))
                    label = f"{rounding.__name__}_{name}_{width}{'_relu' * relu}"
                    yield QuantizedCase(label, model, (torch.randn(2, 3, width),), step=1e-5)
            bias = torch.randn(64)

            def parted(x: Tensor, w: Tensor, bias: Tensor = bias) -> Tensor:
                left, right = F.linear(x, w, bias).chunk(2, -1)
                return left * torch.sigmoid(right)

            width = 128 if "group" in name else 16
            model = AsRuntime(rounding, parted, IntegerWeight(64, width, **options))
            label = f"{rounding.__name__}_{name}_parted"
            yield QuantizedCase(label, model, (torch.randn(2, 3, width),), step=2e-5)
    model = AsRuntime(by_row, lambda x, w: torch.mm(x, w.t()), IntegerWeight(5, 16))
    yield QuantizedCase("by_row_mm", model, (torch.randn(3, 16),), step=1e-5)


def run_time_convolutions() -> Iterator[QuantizedCase]:
    layers: dict[str, tuple[tuple[int, ...], int, Callable[[Tensor, Tensor], Tensor]]] = {
        "plain": ((6, 4, 3, 3), 0, lambda x, w: F.conv2d(x, w, padding=1)),
        "strided": ((6, 4, 3, 3), 0, lambda x, w: torch.relu(F.conv2d(x, w, stride=2))),
        "grouped": ((6, 2, 3, 3), 0, lambda x, w: F.conv2d(x, w, groups=2)),
        "depthwise": ((8, 1, 3, 3), 0, lambda x, w: F.conv2d(x, w, groups=4)),
        "transposed": ((4, 3, 3, 3), 1, lambda x, w: F.conv_transpose2d(x, w, stride=2)),
        "transposed_2": (
            (4, 3, 3, 3),
            1,
            lambda x, w: F.conv_transpose2d(x, w, stride=2, groups=2),
        ),
    }
    for name, (shape, axis, layer) in layers.items():
        model = AsRuntime(by_tensor, layer, IntegerWeight(*shape, axis=axis), 3)
        yield QuantizedCase(f"conv_{name}", model, (torch.randn(2, 4, 7, 6),), step=1e-4)
    line = AsRuntime(by_tensor, F.conv1d, IntegerWeight(6, 4, 3), 2)
    yield QuantizedCase("conv_1d", line, (torch.randn(2, 4, 9),), step=1e-4)


def weights_alone() -> Iterator[QuantizedCase]:
    kinds: dict[str, dict[str, Any]] = {
        "int8": {},
        "int8_tensor": {"axis": None},
        "int8_zero_points": {"zero": 100},
        "int4": {"bits": 4},
        "int4_group": {"bits": 4, "group": 32},
    }
    for name, options in kinds.items():
        for width in (32, 7) if "group" not in name else (64,):
            bias = torch.randn(5)
            yield case(
                f"weight_only_{name}_{width}",
                lambda x, w, bias=bias: torch.relu(F.linear(x, w(), bias)),
                (2, 3, width),
                parts=(IntegerWeight(5, width, **options),),
                step=1e-5,
            )
    yield case(
        "weight_only_conv",
        lambda x, w: F.conv2d(x, w()),
        (2, 4, 7, 7),
        parts=(IntegerWeight(6, 4, 3, 3),),
        step=1e-5,
    )


def expected(one: QuantizedCase) -> tuple[Tensor, ...]:
    """Return what the runtime should compute for a case."""
    model = one.model
    with torch.no_grad():
        found = model.expected(*one.inputs) if isinstance(model, AsRuntime) else model(*one.inputs)
    return found if isinstance(found, tuple) else (found,)
