"""Random scales, zero points, sizes and edge values of quantised payloads, in both runtimes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from lowerdeck.lowered_module import to_backend
from lowerdeck.runner import load
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo.seeds import NIGHTLY
from tests.interop.runs import assert_whole, check, file_of, run

from case_making import Function  # isort: skip
from quantized_cases import IntegerWeight, Step, as_runtime, by_row  # isort: skip

Tensor = torch.Tensor
STEPS = st.builds(
    Step,
    st.floats(-18, 6).map(lambda power: 2.0**power),
    st.integers(-128, 127),
)
FUNCTIONS = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "cat": lambda x, y: torch.cat([x, y], 0),
    "stack": lambda x, y: torch.stack([x, y]),
    "same": lambda x, _: x,
    "relu": lambda x, _: torch.relu(x),
    "clamp": lambda x, _: torch.clamp(x, -0.3, 0.4),
    "leaky_relu": lambda x, _: F.leaky_relu(x, -1.7),
    "sigmoid": lambda x, _: torch.sigmoid(x),
    "tanh": lambda x, _: torch.tanh(x),
    "silu": lambda x, _: F.silu(x),
    "hardsigmoid": lambda x, _: F.hardsigmoid(x),
    "hardswish": lambda x, _: F.hardswish(x),
    "prelu": lambda x, _: F.prelu(x, torch.tensor([-1.3])),
    "prelu_channels": lambda x, _: F.prelu(x, torch.tensor([0.2, -0.7, 1.3, 1e-3, 0.0])),
    "mean_row": lambda x, _: x.mean(-1),
    "mean": lambda x, _: x[None, None].mean([2, 3]),
}
COMMON = settings(max_examples=60 if NIGHTLY else 6, deadline=None)


def all_in_both(model: torch.nn.Module, *inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that the official runtime gives, and those that ours does."""
    program = torch.export.export(model.eval(), inputs)
    assert_whole(to_backend(program, XnnpackPartitioner()))
    file = file_of(program)
    return run(file, [inputs])[0], pytree.tree_leaves(load(file).run("forward", *inputs))


def in_both(model: torch.nn.Module, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first output of each."""
    theirs, ours = all_in_both(model, *inputs)
    return theirs[0], ours[0]


def assert_to_a_step(
    model: torch.nn.Module, *inputs: Tensor, wanted: Tensor | None = None
) -> None:
    """Assert that integers are at most one step from eager's, or from what is wanted, in both."""
    right = pytree.tree_leaves(model(*inputs) if wanted is None else wanted)
    for outputs in all_in_both(model, *inputs):
        for found, expected in zip(outputs, right, strict=True):
            assert found.dtype == torch.int8
            assert int((found.int() - expected.int()).abs().max()) <= 1


@COMMON
@given(
    name=st.sampled_from(sorted(FUNCTIONS)),
    first=STEPS,
    second=STEPS,
    result=STEPS,
    seed=st.integers(0, 2**31),
)
def test_any_scales_give_eager_to_a_step(
    name: str, first: Step, second: Step, result: Step, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def numbers(step: Step) -> Tensor:
        # All integers, and what saturates on both sides.
        wide = torch.rand(4, 5, generator=generator) * 300 - 150
        return (wide - step.zero) * step.scale

    def model(x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = result.quantize(FUNCTIONS[name](first(x), second(y)))
        return found

    assert_to_a_step(Function(model), numbers(first), numbers(second))


@COMMON
@given(
    first=STEPS, second=STEPS, result=STEPS, seed=st.integers(0, 2**31), width=st.integers(1, 70)
)
def test_products_of_activations_give_eager_to_a_step(
    first: Step, second: Step, result: Step, seed: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    even = Step(second.scale)
    # No ties: an input rounded another way is many steps of a sum.
    x, y = (torch.randint(-150, 150, (2, 3, width), generator=generator) for _ in range(2))
    inputs = (x - first.zero) * first.scale, y * even.scale

    def model(x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = result.quantize(first(x) @ even(y).mT)
        return found

    assert_to_a_step(Function(model), *inputs)


EDGES = torch.tensor([-128.0, -127, -100, -3, -1, 0, 1, 2, 50, 126, 127])


POWERS = (-26, -12, -11, -10, -4, 0, 6, 13, 14, 15, 16, 17, 20, 21, 26)


@pytest.mark.parametrize("zero", [0, -128, 127])
@pytest.mark.parametrize("other", [-9, -6, 0, 6])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "maximum"])
def test_results_far_finer_or_coarser_than_inputs(name: str, other: int, zero: int) -> None:
    left, right = torch.meshgrid(EDGES, EDGES, indexing="ij")
    result, second = Step(1.0, 5), Step(2.0**other, -1 - zero)
    firsts = [Step(2.0**power, zero) for power in POWERS]

    def model(y: Tensor, *xs: Tensor) -> list[Tensor]:
        pairs = zip(firsts, xs, strict=True)
        return [result.quantize(FUNCTIONS[name](first(x), second(y))) for first, x in pairs]

    assert_to_a_step(
        Function(model),
        *((right - second.zero) * second.scale,),
        *((left - first.zero) * first.scale for first in firsts),
    )


@COMMON
@given(source=STEPS, target=STEPS, seed=st.integers(0, 2**31))
def test_edge_values_are_quantised_as_documented(source: Step, target: Step, seed: int) -> None:
    x = torch.tensor([0.0, -0.0, 1e-40, 1e30, -1e30, math.inf, -math.inf, math.nan])
    rest = torch.randn(8, generator=torch.Generator().manual_seed(seed)) * source.scale * 100
    x = torch.cat([x, rest])
    wanted = source.quantize(x)
    wanted[7] = 127  # NaN; eager's is whatever the processor makes of it
    wanted[5], wanted[6] = 127, -128
    stepped = target.quantize(source.dequantize(wanted))
    for model, right in (
        (Function(source.quantize), wanted),
        (Function(lambda x: target.quantize(source(x))), stepped),
    ):
        assert_to_a_step(model, x, wanted=right)


@COMMON
@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 70),
    outputs=st.integers(1, 9),
    bits=st.sampled_from([4, 8]),
    groups=st.sampled_from([0, 32, 64, 96, 128]),
    power=st.floats(-30, 20),
    kind=st.sampled_from(["mixed", "positive", "negative", "zero", "constant"]),
    seed=st.integers(0, 2**31),
)
def test_rows_of_any_range_and_width_equal_the_formula(
    rows: int,
    width: int,
    outputs: int,
    bits: int,
    groups: int,
    power: float,
    kind: str,
    seed: int,
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x = torch.randn(rows, width if not groups or bits == 8 else groups * 2) * 2.0**power
        group = groups if bits == 4 else 0
        weight = IntegerWeight(outputs, x.shape[1], bits=bits, group=group)
        bias = torch.randn(outputs) * 2.0**power
    shapes = {"positive": x.abs(), "negative": -x.abs(), "zero": x * 0, "mixed": x}
    x = shapes.get(kind, torch.full_like(x, 2.0**power))
    model = Function(lambda x, w: F.linear(by_row(x), w(), bias), weight)
    with as_runtime():
        wanted = model(x)
    for found in in_both(model, x):
        limit = 1e-5 * float(wanted.abs().max())
        if kind == "zero":
            # Such a row has a step of 1 and a zero point, whose share the runtime takes off in
            # float32, which rounds it.
            limit += 2**-23 * 128 * float(weight().abs().sum(1).max())
        # A tie may be rounded another way: then one input differs by its step.
        step = float((x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)).max()) / 255
        largest = float(weight().abs().max())
        assert float((found - wanted).abs().max()) <= limit + step * largest * 1.01


@COMMON
@given(
    channels=st.integers(1, 4),
    outputs=st.integers(1, 5),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    kind=st.sampled_from(["plain", "depthwise", "transposed"]),
    axis=st.booleans(),
    source=STEPS,
    power=st.floats(-4, 4),
    zero=st.integers(-128, 127),
    seed=st.integers(0, 2**31),
)
def test_convolutions_of_any_scales_give_eager_to_a_step(
    channels: int,
    outputs: int,
    kernel: int,
    stride: int,
    kind: str,
    axis: bool,
    source: Step,
    power: float,
    zero: int,
    seed: int,
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x = (torch.randint(-140, 141, (2, channels, 6, 5)) - source.zero) * source.scale
        turned = kind == "transposed"
        shape = (channels, outputs) if turned else (outputs, channels)
        if kind == "depthwise":
            shape = (channels * outputs, 1)
        along = None if not axis else int(turned)
        weight = IntegerWeight(*shape, kernel, kernel, axis=along)
        inputs = shape[0] if turned else channels
        bias = torch.randn(outputs if turned else shape[0]) * source.scale * inputs
    # From where nearly all saturates to where nearly all is 0.
    result = Step(source.scale * 0.5 * kernel * 2.0**power, zero)

    def model(x: Tensor, w: IntegerWeight) -> Tensor:
        options = {"stride": stride, **({"groups": channels} if kind == "depthwise" else {})}
        layer = F.conv_transpose2d if turned else F.conv2d
        found: Tensor = result.quantize(layer(source(x), w(), bias, **options))
        return found

    # The runtime rounds the bias to a step of its sums as well.
    assert_to_a_step(Function(model, weight), x)


# What else than layers of integers reads rows that are quantised at run time.
WAYS = {
    "two activations": lambda x, y: by_row(x) @ by_row(y).mT,
    "the second of two": lambda x, y: y @ by_row(x).mT,
    "a sum": lambda x, y: by_row(x) * 2 + y,
    "a layer of floats": lambda x, y: F.linear(by_row(x), y),
    "a result": lambda x, y: (rows := by_row(x), rows.exp()),
}


@pytest.mark.parametrize("way", WAYS)
def test_they_are_rounded_as_in_eager(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    # Rounding changes these by 0.01 and more.
    inputs = torch.randn(3, 16), torch.randn(3, 16)
    check(Function(WAYS[way]), inputs, folder=tmp_path, tolerance=1e-4)
