"""Every operator that XNNPACK takes with a dynamic size that becomes 0 at run time.

Right numbers, or a typed error of the runtime that the summary foretold; never a crash, garbage,
or an error that nobody was told of.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.export import Dim, ExportedProgram, export

from lowerdeck.emitter import DecompositionError, MissingKernelError, emit
from lowerdeck.lowered_module import delegation_summary, to_backend
from lowerdeck.serializer import Hazard, verify_pte
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck.xnnpack.operators.table import OPERATORS
from lowerdeck_zoo import official
from tests.interop.test_xnnpack_constant_operands import CALLS, OneCall, named, tensors_of

pytestmark = [
    pytest.mark.skipif(not official.available(), reason=official.REASON),
    pytest.mark.filterwarnings("ignore:Using padding=.same.:UserWarning"),
]
Places = tuple[tuple[int, int], ...]
"""Which input and which dimension of it: all that are one size."""
UNSUPPORTED = {"as_strided.default", "as_strided_copy.default"}
"""Operators that no program has with dynamic sizes: the emitter refuses them."""
OTHERWISE_IN_EAGER = {"pixel_unshuffle.default"}
"""Operators of which torch returns no images with the sizes of its input, against its program."""


def sizes_of(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Iterator[Places]:
    """Yield the dimensions of the inputs that can be dynamic; those that must be equal as one."""
    free = tuple(dict.fromkeys(range(one.dim()), Dim.AUTO) for one in inputs)
    program = export(model, inputs, dynamic_shapes=(free,))
    places = defaultdict(list)
    given = [
        node
        for node in program.graph.find_nodes(op="placeholder")
        if node.name in program.graph_signature.user_inputs
    ]
    for number, node in enumerate(given):
        for axis, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                places[str(size)].append((number, axis))
    yield from map(tuple, places.values())


def exported(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], places: Places
) -> ExportedProgram | None:
    """Return a program of which one size may be 0 to 32, None where torch wants more."""
    size = Dim("size", max=32)
    shapes = tuple({axis: size for one, axis in places if one == k} for k in range(len(inputs)))
    try:
        return export(model, inputs, dynamic_shapes=(shapes,))
    except torch._dynamo.exc.UserError:
        return None


def assert_survives(
    program: ExportedProgram,
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    places: Places,
    path: Path,
) -> None:
    """Run on nothing, and on the example inputs after it."""
    partitioner = XnnpackPartitioner()
    lowered = to_backend(program, partitioner)
    foretold = [
        one for one in delegation_summary(lowered).remarks if one.heading == "fails on nothing"
    ]
    nothing = tuple(
        torch.zeros([0 if (k, axis) in places else size for axis, size in enumerate(one.shape)])
        for k, one in enumerate(inputs)
    )
    try:
        path.write_bytes(emit(lowered).to_bytes())
    except (DecompositionError, MissingKernelError):
        return  # left to other kernels, for which the emitter has no such program
    try:
        with torch.no_grad():
            expected = model(*nothing)
    except (RuntimeError, IndexError):
        return  # it fails in eager, too
    empty, full = official.Call(nothing), official.Call(inputs)
    # An error ends the calls, so what is foretold comes last.
    calls = [full, empty] if foretold else [empty, full, empty, full]
    outcome = official.run(path, calls)
    if isinstance(outcome, official.MethodError) and "CALL_DELEGATE" not in outcome.log:
        return  # a kernel of the runtime fails, not the delegate
    if foretold:
        assert isinstance(outcome, official.MethodError | official.Ran), (outcome, foretold)
        outcome = official.run(path, [full])
    assert isinstance(outcome, official.Ran), (outcome, places, partitioner.refused)
    results = [model(*inputs)] if foretold else [expected, model(*inputs)] * 2
    for (found,), wanted in zip(outcome.outputs, results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("name", sorted({*CALLS} - UNSUPPORTED - OTHERWISE_IN_EAGER))
def test_each_operator_survives_nothing_or_says_so(name: str, tmp_path: Path) -> None:
    target = next(operator for operator in OPERATORS if named(operator) == name)
    for arguments in CALLS[name]:
        count = len(tensors_of(arguments))
        for constant in {(), tuple(range(1, count))}:
            model = OneCall(target, arguments, constant).eval()
            inputs = tuple(
                torch.rand(sizes) + 0.5
                for position, sizes in enumerate(tensors_of(arguments))
                if position not in constant
            )
            for places in sizes_of(model, inputs):
                program = exported(model, inputs, places)
                if program is not None:
                    assert_survives(program, model, inputs, places, tmp_path / "file.pte")


class Net(nn.Module):
    """A few layers in a row; ``way`` says which."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.deep = nn.Conv2d(4, 4, 3, groups=4)
        self.linear = nn.Linear(4, 6)
        self.wide = nn.Linear(36, 4)

    def forward(self, x: torch.Tensor) -> Any:
        if self.way == "pool":
            return F.max_pool2d(x, 2)
        if self.way == "pool and the same sizes":
            return F.max_pool2d(x, 2).reshape(-1, 4, 3, 3)
        if self.way == "pool and linear":
            return self.wide(F.avg_pool2d(self.conv(x), 2).flatten(1))
        if self.way == "two results":
            y = self.conv(x)
            return y, y.mean([2, 3])
        if self.way == "residual":
            return self.conv(x) + x
        if self.way == "two convolutions":
            return self.deep(self.conv(x).relu()).sigmoid() * 2
        if self.way == "gate":
            y = self.deep(x)
            return y * self.linear(y.mean([2, 3]))[:, :4, None, None]
        if self.way == "join":
            return torch.cat([self.conv(x), x], 1)
        if self.way == "heights":
            return x.mean([2, 3]), self.linear(x.mean([2, 3], keepdim=True).flatten(1))
        raise ValueError(self.way)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize(
    "way",
    [
        *("pool", "pool and the same sizes", "pool and linear", "two results", "residual"),
        *("two convolutions", "gate", "join", "heights"),
    ],
)
def test_layers_in_a_row_survive_nothing_or_say_so(way: str, half: bool, tmp_path: Path) -> None:
    model, images = Net(way).eval(), torch.rand(2, 4, 6, 6)
    if half:
        model, images = model.half(), images.half()
    places: Places = ((0, 2 if way == "heights" else 0),)
    shapes = ({axis: Dim("size", max=16) for _, axis in places},)
    lowered = to_backend(
        export(model, (images,), dynamic_shapes=shapes), partitioner := XnnpackPartitioner()
    )
    assert not partitioner.refused
    foretold = bool(partitioner.remarks["fails on nothing"])
    assert foretold == (way in ("residual", "join"))
    path = tmp_path / "file.pte"
    path.write_bytes(emit(lowered).to_bytes())
    empty = torch.zeros(
        [0 if axis == places[0][1] else size for axis, size in enumerate(images.shape)],
        dtype=images.dtype,
    )
    outcome = official.run(path, [official.Call((empty,)), official.Call((images,))])
    if foretold:
        assert isinstance(outcome, official.MethodError | official.Ran), outcome
        return
    assert isinstance(outcome, official.Ran), outcome
    for found, given in zip(outcome.outputs, (empty, images), strict=True):
        with torch.no_grad():
            wanted = model(given)
        if half and way == "heights":
            # A layer of float16 makes -inf of NaN, which the mean of nothing is.
            wanted = wanted[0], wanted[1].nan_to_num(-torch.inf)
        for one, other in zip(
            found, wanted if isinstance(wanted, tuple) else [wanted], strict=True
        ):
            bound = 1e-2 if half else 2e-5
            torch.testing.assert_close(one, other, rtol=bound, atol=bound, equal_nan=True)


def test_the_inner_size_of_a_layer_with_a_computed_weight_stays_with_other_kernels(
    tmp_path: Path,
) -> None:
    class Computed(nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return F.linear(x, weight * 2)

    inner = Dim("inner", max=16)
    inputs = torch.rand(2, 3), torch.rand(5, 3)
    program = export(Computed(), inputs, dynamic_shapes=({1: inner}, {1: inner}))
    partitioner = XnnpackPartitioner()
    path = tmp_path / "file.pte"
    path.write_bytes(emit(to_backend(program, partitioner)).to_bytes())
    assert "ends the runtime's process" in partitioner.refused["linear"]
    outcome = official.run(path, [official.Call((torch.rand(2, 0), torch.rand(5, 0)))])
    assert isinstance(outcome, official.Ran), outcome
    assert torch.equal(outcome.outputs[0][0], torch.zeros(2, 5))


def test_sizes_that_are_never_0_need_no_word() -> None:
    image = (torch.rand(2, 4, 6, 6),)
    for size in (Dim.AUTO, Dim.DYNAMIC, Dim("size", min=1), Dim("size", min=2)):
        program = export(Net("residual").eval(), image, dynamic_shapes=({0: size},))
        partitioner = XnnpackPartitioner()
        to_backend(program, partitioner)
        assert not partitioner.refused
        assert not partitioner.remarks["fails on nothing"]


class Growing(nn.Module):
    """Repeats something computed along a dynamic size, then computes in place."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if self.way == "repeated":
            y = y - row.exp()
        elif self.way == "norm":
            y = self.norm(y)
        elif self.way == "repeated rows":
            y = y * x[:, :1].exp()
        elif self.way == "expanded":
            y = y.unsqueeze(1).expand(-1, 3, 8) + row
        return (y * 0.5).square().sigmoid()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("way", ["repeated", "norm", "repeated rows", "expanded"])
def test_sizes_may_grow_from_any_first_call(way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = Growing(way).eval().to(dtype)
    rows, row = torch.rand(9, 8, dtype=dtype), torch.rand(1, 8, dtype=dtype)
    size = Dim("size", max=16)
    program = export(model, (rows, row), dynamic_shapes=({0: size}, {}))
    partitioner = XnnpackPartitioner()
    path = tmp_path / "file.pte"
    path.write_bytes(emit(to_backend(program, partitioner)).to_bytes())
    assert not partitioner.refused
    assert not partitioner.remarks["fails on nothing"]
    for first in itertools.permutations([0, 1, 5, 16], 3):
        counts = [*first, 9]
        calls = [(torch.rand(count, 8, dtype=dtype), row) for count in counts]
        outcome = official.run(path, [official.Call(call) for call in calls])
        assert isinstance(outcome, official.Ran), (counts, outcome)
        for (found,), call in zip(outcome.outputs, calls, strict=True):
            bound = 1e-2 if dtype == torch.float16 else 1e-5
            with torch.no_grad():
                torch.testing.assert_close(found, model(*call), rtol=bound, atol=bound)


def test_two_sizes_may_grow_and_shrink_in_turn(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            column = (x * 2).exp().square().mean(-1).sigmoid()[:, None]
            return (column * (y * 2).sin().square().mean(-1)[None, :]).exp()

    first, second = Dim("first", max=12), Dim("second", max=12)
    shapes = ({0: first}, {0: second})
    program = export(Two(), (torch.rand(4, 8), torch.rand(5, 8)), dynamic_shapes=shapes)
    path = tmp_path / "file.pte"
    path.write_bytes(emit(to_backend(program, XnnpackPartitioner())).to_bytes())
    pairs = [(0, 9), (9, 0), (1, 9), (9, 1), (12, 12)]
    for counts in itertools.product(pairs, repeat=3):
        calls = [(torch.rand(one, 8), torch.rand(other, 8)) for one, other in counts]
        outcome = official.run(path, [official.Call(call) for call in calls])
        assert isinstance(outcome, official.Ran), (counts, outcome)
        for (found,), call in zip(outcome.outputs, calls, strict=True):
            torch.testing.assert_close(found, Two()(*call))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("constant", [False, True])
def test_a_bias_of_one_element_is_added_to_every_output(
    constant: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    class OneBias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.rand(5, 3, dtype=dtype))
            self.register_buffer("bias", torch.rand(1, dtype=dtype))

        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
            chosen = self.get_buffer("bias") if constant else bias * 2
            weight = self.get_buffer("weight")
            return F.linear(x, weight, chosen), torch.addmm(chosen, x, weight.t())

    inputs = torch.rand(2, 3, dtype=dtype), torch.rand(1, dtype=dtype)
    path = tmp_path / "file.pte"
    model = OneBias()
    program = export(model, inputs)
    path.write_bytes(emit(to_backend(program, XnnpackPartitioner())).to_bytes())
    outcome = official.run(path, [official.Call(inputs)])
    assert isinstance(outcome, official.Ran), outcome
    for found, wanted in zip(outcome.outputs[0], model(*inputs), strict=True):
        bound = 1e-2 if dtype == torch.float16 else 1e-5
        torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)


def _window(way: str) -> nn.Module:
    torch.manual_seed(0)
    conv = {"kernel_size": 3, "padding": 1}
    return {
        "pool": nn.AvgPool2d(3, 1, 1),
        "convolution without padding": nn.Conv2d(4, 4, 3),
        "padded before": nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(4, 4, 3)),
        "strided": nn.Sequential(nn.Conv2d(4, 4, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        "transposed": nn.Sequential(nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(4, 4, **conv)),
        "in groups": nn.Sequential(nn.Conv2d(4, 4, **conv, groups=4), nn.Conv2d(4, 4, 3)),
        "one dimension": nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3)),
        "upsampled": nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(4, 4, 3)),
        "shuffled": nn.Sequential(nn.PixelShuffle(2), nn.Conv2d(1, 4, 3)),
    }[way].eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "way",
    [
        *("pool", "convolution without padding", "padded before", "strided", "transposed"),
        *("in groups", "one dimension", "upsampled", "shuffled"),
    ],
)
def test_windows_slide_over_sizes_that_vary(way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """What a payload declares of sizes that vary is no reason to refuse it."""
    model = _window(way).to(dtype)
    height = Dim("height", min=8, max=32)
    program = export(
        model, (torch.randn(2, 4, 16, 16, dtype=dtype),), dynamic_shapes=({2: height},)
    )
    lowered = to_backend(program, XnnpackPartitioner())
    assert delegation_summary(lowered).delegates
    (tmp_path / "file.pte").write_bytes(emit(lowered).to_bytes())
    given = [(torch.randn(2, 4, size, 16, dtype=dtype),) for size in (8, 32, 9, 16)]
    outcome = official.run(tmp_path / "file.pte", [official.Call(one) for one in given])
    assert isinstance(outcome, official.Ran), outcome
    for one, (found,) in zip(given, outcome.outputs, strict=True):
        with torch.no_grad():
            wanted = model(*one)
        bound = 2e-2 if dtype is torch.float16 else 2e-5
        torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)


def test_no_images_of_a_varying_height_are_told_of() -> None:
    """The runtime leaves their sizes unset, and no reshape can tell two that vary."""
    heights = {0: Dim("images", max=9), 2: Dim("height", min=4, max=9)}
    x = torch.randn(5, 4, 5, 5)
    for layer, told in ((nn.Conv2d(4, 4, 3), True), (nn.AdaptiveAvgPool2d(1), False)):
        program = export(nn.Sequential(layer, nn.ReLU()).eval(), (x,), dynamic_shapes=(heights,))
        lowered = to_backend(program, XnnpackPartitioner())
        remarks = delegation_summary(lowered).remarks
        assert any(one.heading == "fails on nothing" for one in remarks) == told
        hazards: list[Hazard] = []
        file = emit(lowered).to_bytes()
        verify_pte(file, on_hazard=hazards.append)
        assert [one.field for one in hazards] == ["method 'forward'.delegates[0]"] * told
        # It is the number of images that ends it.
        outcome = official.run(
            file, [official.Call((torch.ones(2, 4, 4, 5),)), official.Call((x,))]
        )
        assert isinstance(outcome, official.Ran)
