"""Every operator that XNNPACK takes with a dynamic size that becomes 0 at run time.

Right numbers, or a typed error of the runtime; never a crash.
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
from lowerdeck.lowered_module import to_backend
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Of, assert_close, official
from tests.interop.runs import file_of, run
from tests.interop.test_xnnpack_constant_operands import CALLS, models_of, tensors_of

Places = tuple[tuple[int, int], ...]
"""Which input and which dimension of it: all that are one size."""


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
    lowered = to_backend(program, XnnpackPartitioner())
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
    # An error ends the calls.
    outcome = official.run(path, [full, empty])
    if isinstance(outcome, official.MethodError):
        outcome = official.run(path, [full])
    assert isinstance(outcome, official.Ran), (outcome, places)
    for (found,), wanted in zip(outcome.outputs, [model(*inputs), expected], strict=False):
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5, equal_nan=True)


def none_or_all_but_first(arguments: tuple[Any, ...]) -> set[tuple[int, ...]]:
    return {(), tuple(range(1, len(tensors_of(arguments))))}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_each_operator_survives_nothing(name: str, tmp_path: Path) -> None:
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
def test_layers_in_a_row_survive_nothing(way: str, half: bool, tmp_path: Path) -> None:
    model, images = layers_in_a_row(way), torch.rand(2, 4, 6, 6)
    if half:
        model, images = model.half(), images.half()
    axis = 2 if way == "heights" else 0
    shapes = (({axis: Dim("size", max=16)},),)
    partitioner = XnnpackPartitioner()
    file = file_of(model, (images,), partitioner, dynamic_shapes=shapes)
    assert not partitioner.refused
    # Not a narrowed one: the runtime takes no strides of other sizes.
    empty = images.new_zeros([0 if dim == axis else n for dim, n in enumerate(images.shape)])
    if way in ("residual", "join"):
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
    bound = 1e-2 if dtype == torch.float16 else 1e-5
    for first in itertools.permutations([0, 1, 5, 16], 3):
        calls = [(torch.rand(count, 8, dtype=dtype), row) for count in (*first, 9)]
        for found, call in zip(run(file, calls, tmp_path), calls, strict=True):
            with torch.no_grad():
                assert_close(found, model(*call), rtol=bound, atol=bound)
