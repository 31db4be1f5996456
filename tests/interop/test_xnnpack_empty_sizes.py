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
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from lowerdeck.emitter import DecompositionError, MissingKernelError, emit
from lowerdeck.lowered_module import delegation_summary, to_backend
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Of, assert_close, official, program
from tests.interop.runs import file_of, run
from tests.interop.test_xnnpack_constant_operands import CALLS, models_of, tensors_of

Places = tuple[tuple[int, int], ...]
"""Which input and which dimension of it: all that are one size."""
UNSUPPORTED = {"as_strided.default", "as_strided_copy.default"}
"""Operators that no program has with dynamic sizes: the emitter refuses them."""
OTHERWISE_IN_EAGER = {"pixel_unshuffle.default"}
"""Operators of which torch returns no images with the sizes of its input, against its program."""


def sizes_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> Iterator[Places]:
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
    model: nn.Module, inputs: tuple[Tensor, ...], places: Places
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
    inputs: tuple[Tensor, ...],
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


def none_or_all_but_first(arguments: tuple[Any, ...]) -> set[tuple[int, ...]]:
    return {(), tuple(range(1, len(tensors_of(arguments))))}


@pytest.mark.parametrize("name", sorted({*CALLS} - UNSUPPORTED - OTHERWISE_IN_EAGER))
def test_each_operator_survives_nothing_or_says_so(name: str, tmp_path: Path) -> None:
    for model, inputs in models_of(name, none_or_all_but_first):
        for places in sizes_of(model, inputs):
            program = exported(model, inputs, places)
            if program is not None:
                assert_survives(program, model, inputs, places, tmp_path / "file.pte")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.deep = nn.Conv2d(4, 4, 3, groups=4)
        self.linear, self.wide = nn.Linear(4, 6), nn.Linear(36, 4)


def _gate(m: Any, x: Tensor) -> Tensor:
    y = m.deep(x)
    return y * m.linear(y.mean([2, 3]))[:, :4, None, None]


def _heights(m: Any, x: Tensor) -> Any:
    return x.mean([2, 3]), m.linear(x.mean([2, 3], keepdim=True).flatten(1))


ROWS: dict[str, Any] = {
    "pool": lambda m, x: F.max_pool2d(x, 2),
    "pool and the same sizes": lambda m, x: F.max_pool2d(x, 2).reshape(-1, 4, 3, 3),
    "pool and linear": lambda m, x: m.wide(F.avg_pool2d(m.conv(x), 2).flatten(1)),
    "two results": lambda m, x: (y := m.conv(x), y.mean([2, 3])),
    "residual": lambda m, x: m.conv(x) + x,
    "two convolutions": lambda m, x: m.deep(m.conv(x).relu()).sigmoid() * 2,
    "gate": _gate,
    "join": lambda m, x: torch.cat([m.conv(x), x], 1),
    "heights": _heights,
}


def layers_in_a_row(way: str) -> nn.Module:
    return Of(lambda m, x: ROWS[way](m.held, x), held=Layers()).eval()


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("way", ROWS)
def test_layers_in_a_row_survive_nothing_or_say_so(way: str, half: bool, tmp_path: Path) -> None:
    model, images = layers_in_a_row(way), torch.rand(2, 4, 6, 6)
    if half:
        model, images = model.half(), images.half()
    axis = 2 if way == "heights" else 0
    shapes = (({axis: Dim("size", max=16)},),)
    partitioner = XnnpackPartitioner()
    file = file_of(model, (images,), partitioner, dynamic_shapes=shapes)
    assert not partitioner.refused
    foretold = bool(partitioner.remarks["fails on nothing"])
    assert foretold == (way in ("residual", "join"))
    # Not a narrowed one: the runtime takes no strides of other sizes.
    empty = images.new_zeros([0 if dim == axis else n for dim, n in enumerate(images.shape)])
    if foretold:
        outcome = official.run(file, [official.Call((empty,)), official.Call((images,))])
        assert isinstance(outcome, official.MethodError | official.Ran), outcome
        return
    bound = 1e-2 if half else 2e-5
    for found, given in zip(
        run(file, [(empty,), (images,)], tmp_path), (empty, images), strict=True
    ):
        with torch.no_grad():
            wanted = model(given)
        if half and way == "heights":
            # A layer of float16 makes -inf of NaN, which the mean of nothing is.
            wanted = wanted[0], wanted[1].nan_to_num(-torch.inf)
        assert_close(found, wanted, rtol=bound, atol=bound)


def test_sizes_that_are_never_0_need_no_word() -> None:
    partitioner = XnnpackPartitioner()
    to_backend(program("dynamic_windows").export(), partitioner)
    assert not partitioner.refused
    image = (torch.rand(2, 4, 6, 6),)
    for size in (Dim.AUTO, Dim.DYNAMIC, Dim("size", min=1), Dim("size", min=2)):
        partitioner = XnnpackPartitioner()
        model, shapes = layers_in_a_row("residual"), (({0: size},),)
        to_backend(torch.export.export(model, image, dynamic_shapes=shapes), partitioner)
        assert not partitioner.refused
        assert not partitioner.remarks["fails on nothing"]


# What repeats something computed along a dynamic size, before computing in place.
GROWING: dict[str, Any] = {
    "repeated": lambda m, x, row: x * 2 - row.exp(),
    "norm": lambda m, x, row: m.norm(x * 2),
    "repeated rows": lambda m, x, row: x * 2 * x[:, :1].exp(),
    "expanded": lambda m, x, row: (x * 2).unsqueeze(1).expand(-1, 3, 8) + row,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("way", GROWING)
def test_sizes_may_grow_from_any_first_call(way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def grown(m: Any, x: Tensor, row: Tensor) -> Tensor:
        return (GROWING[way](m, x, row) * 0.5).square().sigmoid()

    model = Of(grown, norm=nn.LayerNorm(8)).eval().to(dtype)
    rows, row = torch.rand(9, 8, dtype=dtype), torch.rand(1, 8, dtype=dtype)
    partitioner, shapes = XnnpackPartitioner(), (({0: Dim("size", max=16)}, {}),)
    file = file_of(model, (rows, row), partitioner, dynamic_shapes=shapes)
    assert not partitioner.refused
    assert not partitioner.remarks["fails on nothing"]
    bound = 1e-2 if dtype == torch.float16 else 1e-5
    for first in itertools.permutations([0, 1, 5, 16], 3):
        calls = [(torch.rand(count, 8, dtype=dtype), row) for count in (*first, 9)]
        for found, call in zip(run(file, calls, tmp_path), calls, strict=True):
            with torch.no_grad():
                assert_close(found, model(*call), rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("layer", "told"), [(nn.Conv2d(4, 4, 3), True), (nn.AdaptiveAvgPool2d(1), False)], ids=str
)
def test_no_images_of_a_varying_height_are_told_of(layer: nn.Module, told: bool) -> None:
    """The runtime leaves their sizes unset, and no reshape can tell two that vary."""
    heights = {0: Dim("images", max=9), 2: Dim("height", min=4, max=9)}
    x = torch.randn(5, 4, 5, 5)
    images = export(nn.Sequential(layer, nn.ReLU()).eval(), (x,), dynamic_shapes=(heights,))
    lowered = to_backend(images, XnnpackPartitioner())
    remarks = delegation_summary(lowered).remarks
    assert any(one.heading == "fails on nothing" for one in remarks) == told
    file = emit(lowered).to_bytes()
    # It is the number of images that ends it.
    run(file, [(torch.ones(2, 4, 4, 5),), (x,)])
