"""Norms of numbers whose mean is large beside their deviation lose no more than eager does.

The runtime's own kernels do: they subtract the square of the mean from the mean of the squares.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lowerdeck.emitter import emit
from lowerdeck_zoo import Of, official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

SHAPE = (3, 4, 6, 8)
WEIGHT = torch.linspace(0.5, 2, 4)
NORMS: dict[str, Callable[[Tensor], Any]] = {
    "layer": lambda x: nn.functional.layer_norm(x, (8,)),
    "layer, two dimensions": lambda x: nn.functional.layer_norm(x, (6, 8)),
    "layer, with its mean": lambda x: torch.native_layer_norm(x, [8], None, None, 1e-5),
    "group": lambda x: nn.functional.group_norm(x, 2, WEIGHT.to(x.dtype), WEIGHT.to(x.dtype)),
    "group of one": lambda x: nn.functional.group_norm(x, 4),
    "one group": lambda x: nn.functional.group_norm(x, 1),
    "group of rows": lambda x: nn.functional.group_norm(x.flatten(0, 2)[:, :4], 2),
    "group, with its mean": lambda x: torch.native_group_norm(
        x, None, None, x.shape[0], 4, x.shape[2] * x.shape[3], 2, 1e-5
    ),
    "instance": nn.functional.instance_norm,
    "batch, of this call": lambda x: nn.functional.batch_norm(
        x, None, None, WEIGHT.to(x.dtype), WEIGHT.to(x.dtype), training=True
    ),
    "batch, with its mean": lambda x: torch._native_batch_norm_legit(
        x, None, None, True, 0.1, 1e-5
    ),
    "variance": lambda x: (x.var(-1), x.std((0, 2)), torch.var_mean(x, 1)),
    "layer, channels last": lambda x: nn.functional.layer_norm(
        x.to(memory_format=torch.channels_last) + 1, (8,)
    ),
    "group, channels last": lambda x: nn.functional.group_norm(
        x.to(memory_format=torch.channels_last) + 1, 2
    ),
}


def images(mean: float, rows: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(rows, *SHAPE[1:], generator=torch.Generator().manual_seed(rows)) + mean
    return made.to(dtype)


def outputs(tmp_path: Path, program: Any, calls: list[Tensor]) -> list[list[Tensor]]:
    """Return the outputs of the official runtime, from a path and from bytes alike."""
    emitted = emit(program)
    path = tmp_path / "norm.pte"
    emitted.save(path)
    given = [official.Call((call,)) for call in calls]
    mapped, read = official.run_many(
        [official.Case(path, given), official.Case(path.read_bytes(), given)]
    )
    assert isinstance(mapped, official.Ran), mapped
    assert isinstance(read, official.Ran), read
    for one, other in zip(mapped.outputs, read.outputs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    return mapped.outputs


def worst(found: list[Tensor], exact: list[Tensor]) -> float:
    """Return the largest difference, by the largest number of each output."""
    return max(
        float((one.double() - other).abs().max() / max(1.0, float(other.abs().max())))
        for one, other in zip(found, exact, strict=True)
    )


@pytest.mark.parametrize("mean", [0.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("name", NORMS)
def test_norm_is_as_exact_as_eager(tmp_path: Path, name: str, mean: float) -> None:
    model, given = Of(NORMS[name]), images(mean)
    if name.startswith("group, with"):
        # Sizes that vary are numbers of the program here, which the test below is for.
        model = Of(lambda x: torch.native_group_norm(x, None, None, 3, 4, 48, 2, 1e-5))
    exact = pytree.tree_leaves(Of(NORMS[name])(given.double()))
    (found,) = outputs(tmp_path, torch.export.export(model, (given,)), [given])
    eager = worst(pytree.tree_leaves(model(given)), exact)
    assert worst(found, exact) <= 4 * eager + 2e-6


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("name", NORMS)
def test_norm_of_sizes_that_vary(tmp_path: Path, name: str, least: int) -> None:
    model = Of(NORMS[name])
    rows, height = torch.export.Dim("rows", min=least, max=5), torch.export.Dim("height", max=9)
    layered = name.startswith("layer, two")
    sizes = {0: rows} if layered else {0: rows, 2: height}
    program = torch.export.export(model, (images(100.0),), dynamic_shapes=((sizes,),))
    calls = [images(100.0, count) for count in (3, 5, 1, 2)]
    if not layered:
        calls.append(torch.cat([calls[0], calls[0][:, :, :3] - 7], 2))
    for given, found in zip(calls, outputs(tmp_path, program, calls), strict=True):
        exact = pytree.tree_leaves(model(given.double()))
        eager = worst(pytree.tree_leaves(model(given)), exact)
        assert worst(found, exact) <= 4 * eager + 2e-6


@pytest.mark.parametrize("groups", [1, 2])
def test_group_norm_of_channels_that_vary(tmp_path: Path, groups: int) -> None:
    model = Of(lambda x: nn.functional.group_norm(x, groups))
    half = torch.export.Dim("half", max=5)
    channels = half if groups == 1 else 2 * half
    program = torch.export.export(model, (images(100.0),), dynamic_shapes=(({1: channels},),))
    calls = [images(100.0), torch.cat([images(100.0), images(90.0)[:, :2]], 1)]
    calls = calls if groups == 2 else [one[:, 1:].contiguous() for one in calls]
    for given, found in zip(calls, outputs(tmp_path, program, calls), strict=True):
        exact = pytree.tree_leaves(model(given.double()))
        eager = worst(pytree.tree_leaves(model(given)), exact)
        assert worst(found, exact) <= 4 * eager + 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["layer", "group", "instance", "one group"])
def test_norm_in_other_types(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model, given = Of(NORMS[name]), images(10.0, dtype=dtype)
    exact = pytree.tree_leaves(model(given.double()))
    (found,) = outputs(tmp_path, torch.export.export(model, (given,)), [given])
    eager = worst(pytree.tree_leaves(model(given)), exact)
    assert worst(found, exact) <= 4 * eager + 2e-6


def test_variance_of_half_precision_is_finite(tmp_path: Path) -> None:
    given = (torch.arange(8.0) * 100 - 350).half()[None]
    model = Of(lambda x: (x.var(1), torch.var_mean(x, 1), x.std(1), x.var()))
    (found,) = outputs(tmp_path, torch.export.export(model, (given,)), [given])
    for one, want in zip(found, pytree.tree_leaves(model(given)), strict=True):
        torch.testing.assert_close(one, want, rtol=2e-3, atol=0, equal_nan=True)


def test_norm_of_nothing(tmp_path: Path) -> None:
    rows = torch.export.Dim("rows", min=0, max=5)
    for name in ("layer", "group"):
        program = torch.export.export(
            Of(NORMS[name]), (images(1.0),), dynamic_shapes=(({0: rows},),)
        )
        ((found,),) = outputs(tmp_path, program, [images(1.0)[:0]])
        assert found.shape == (0, *SHAPE[1:])


def test_unread_mean_is_not_made() -> None:
    program = torch.export.export(Of(NORMS["layer"]), (images(1.0),))
    plan = emit(program).program.execution_plan[0]
    names = [operator.name for operator in plan.operators]
    assert sorted(names) == ["aten::mean", "aten::native_layer_norm", "aten::sub"]
