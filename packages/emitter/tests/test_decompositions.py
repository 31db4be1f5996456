"""The rules that take operators apart give torch's own values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emitter_running import check as check_program  # type: ignore[import-not-found]

from lowerdeck.decompose import decompose
from lowerdeck.emitter.decompositions.experts import expert_rules, grouped_product
from lowerdeck.emitter.decompositions.grids import GRIDS
from lowerdeck.emitter.decompositions.integers import INTEGERS
from lowerdeck.emitter.decompositions.norms import BATCH_NORMS
from lowerdeck.emitter.decompositions.ordering import ORDERING
from lowerdeck.emitter.decompositions.pools import POOLS
from lowerdeck.emitter.decompositions.quantization import (
    _quantize,
    _quantize_channels,
    _quantize_per_token,
)
from lowerdeck.emitter.decompositions.quirks import QUIRKS
from lowerdeck.emitter.decompositions.random_numbers import dropout
from lowerdeck.emitter.decompositions.running import RUNNING
from lowerdeck.emitter.decompositions.scatter_reductions import SCATTER_REDUCTIONS
from lowerdeck.emitter.decompositions.volumes import VOLUMES, conv3d
from lowerdeck_zoo import Of

RULES: dict[Any, Any] = {
    **VOLUMES,
    **POOLS,
    **ORDERING,
    **RUNNING,
    **SCATTER_REDUCTIONS,
    **GRIDS,
    **QUIRKS,
    **INTEGERS,
}
ATEN = torch.ops.aten


def check(target: Any, *args: Any, only: int | None = None, **kwargs: Any) -> None:
    """Compare the rule of ``target`` with torch, where torch accepts the arguments."""
    try:
        expected = target(*args, **kwargs)
    except RuntimeError:
        return
    found = RULES[target](*args, **kwargs)
    assert found is not NotImplemented
    if isinstance(expected, tuple):
        found, expected = tuple(found)[:only], tuple(expected)[:only]
    # Integers are compared exactly, whatever their size.
    exact = expected if isinstance(expected, tuple) else (expected,)
    bound = 1e-4 if any(value.is_floating_point() for value in exact) else 0
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound, equal_nan=True)


KERNELS = [(1, 1, 1), (3, 3, 3), (2, 3, 1), (1, 3, 3), (3, 1, 1)]
STRIDES = [(1, 1, 1), (2, 2, 2), (2, 1, 3), (3, 3, 3)]
PADDINGS = [(0, 0, 0), (1, 1, 1), (2, 0, 1)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("stride", STRIDES)
def test_a_convolution_over_a_volume_is_one_over_images(kernel: Any, stride: Any) -> None:
    target = ATEN.convolution.default
    x, bias = torch.randn(2, 4, 6, 7, 5), torch.randn(6)
    for padding, dilation, groups in itertools.product(PADDINGS, (1, 2), (1, 2)):
        where = (stride, padding, [dilation] * 3)
        weight = torch.randn(6, 4 // groups, *kernel)
        check(target, x, weight, bias, *where, False, [0] * 3, groups)
        weight = torch.randn(4, 6 // groups, *kernel)
        for output_padding in ([0, 0, 0], [max(s, dilation) - 1 for s in stride]):
            check(target, x, weight, bias, *where, True, output_padding, groups)


@pytest.mark.parametrize("depth", [6, 7])
def test_frames_of_patches_are_not_stacked(depth: int) -> None:
    x, weight = torch.randn(2, 4, depth, 8, 8), torch.randn(6, 4, 2, 4, 4)
    patches = Of(lambda x: conv3d(x, weight, None, (2, 4, 4)))
    program = torch.export.export(patches, (x,))
    wanted = torch.nn.functional.conv3d(x, weight, None, (2, 4, 4))
    torch.testing.assert_close(program.module()(x), wanted, atol=1e-4, rtol=1e-4)
    assert not program.graph.find_nodes(op="call_function", target=ATEN.stack.default)


def _windows() -> Iterator[tuple[Any, ...]]:
    yield from itertools.product(
        ([2], [3, 2, 1], [1, 3, 3]), ([], [1], [2, 1, 3]), ([0], [1, 1, 0], [0, 1, 1])
    )


def test_averages_over_blocks() -> None:
    x = torch.randn(2, 3, 6, 7, 5)
    for window, ceil, counted, divisor in itertools.product(
        _windows(), (False, True), (False, True), (None, 5)
    ):
        check(ATEN.avg_pool3d.default, x, *window, ceil, counted, divisor)


def test_maxima_over_blocks_and_the_first_index_of_each() -> None:
    ties = torch.randint(0, 3, (2, 3, 6, 7, 5)).float()
    for x, window, dilation, ceil in itertools.product(
        (torch.randn(2, 3, 6, 7, 5), ties, ties[0]), _windows(), ([1], [2, 1, 1]), (False, True)
    ):
        check(ATEN.max_pool3d_with_indices.default, x, *window, dilation, ceil)


@pytest.mark.parametrize("blocks", [(1, 1, 1), (2, 3, 4), (6, 7, 5), (3, 5, 2), (1, 2, 1)])
def test_pools_with_as_many_blocks_as_asked_for(blocks: Any) -> None:
    ties = torch.randint(0, 3, (2, 3, 6, 7, 5)).float()
    for x in (torch.randn(2, 3, 6, 7, 5), ties, ties[0]):
        check(ATEN._adaptive_avg_pool3d.default, x, blocks)
        check(ATEN.adaptive_max_pool3d.default, x, blocks)
        check(ATEN.adaptive_max_pool2d.default, x[0], blocks[1:])


SHAPES = [
    # What is reduced into, the index, the source, the dimension.
    ((5, 3), (7, 3), (7, 3), 0),
    ((5, 3), (7, 2), (8, 3), 0),
    ((5, 3), (4, 6), (5, 8), -1),
    ((4,), (9,), (9,), 0),
    ((3, 4, 5), (2, 6, 4), (3, 6, 5), 1),
    ((), (), (), 0),
    ((3,), (0,), (0,), 0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_reductions_into_positions(dtype: torch.dtype, reduce: str) -> None:
    for (shape, index_shape, source_shape, dim), own in itertools.product(SHAPES, (True, False)):
        x = torch.randint(-5, 6, shape).to(dtype)
        source = torch.randint(-5, 6, source_shape).to(dtype)
        if dtype.is_floating_point and source.numel():
            source.view(-1)[0] = math.nan
        index = torch.randint(0, shape[dim] if shape else 1, index_shape)
        target = ATEN.scatter_reduce.two
        check(target, x, dim, index, source, reduce, include_self=own)


def test_the_first_position_of_each_cell_of_dynamic_sizes() -> None:
    """As in TAPAS."""

    def first(cells: torch.Tensor) -> torch.Tensor:
        batch, length = cells.shape
        index = (cells + 8 * torch.arange(batch)[:, None]).flatten()
        positions = torch.arange(length).repeat(batch).float()
        return torch.zeros(8 * batch).scatter_reduce(
            0, index, positions, "amin", include_self=False
        )

    inputs = [(torch.randint(0, 8, size),) for size in ((2, 16), (3, 5), (1, 20))]
    dims = ({0: torch.export.Dim.AUTO(max=4), 1: torch.export.Dim.AUTO(max=32)},)
    check_program(first, *inputs, dynamic_shapes=(dims,))


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_bags_of_rows(mode: int) -> None:
    weight, rows = torch.randn(6, 4), torch.tensor([0, 2, 5, 2, 1, 3, 2, 4])
    some = ([0, 3, 3, 5], [0, 3, 5])
    for ended, padding, begun in itertools.product((False, True), (-1, 2), some):
        starts = torch.tensor(begun + ([8] if ended else []))
        factors = torch.randn(8) if mode == 0 else None
        target = ATEN._embedding_bag_forward_only.default
        options = (False, mode, False, factors, ended, padding)
        check(target, weight, rows, starts, *options, only=1)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_rows_that_were_taken_apart_before(mode: str) -> None:
    # Results that nobody reads have sizes of their own, which rules are held to.
    rows = torch.tensor([0, 2, 5, 2, 1, 3, 2, 4])
    for ended, padding, weighted in itertools.product((False, True), (None, 2), (False, True)):
        if weighted and mode != "sum":
            continue
        starts = torch.tensor([0, 3, 5] + ([8] if ended else []))
        bags = torch.nn.EmbeddingBag(6, 4, None, 2.0, False, mode, False, None, ended, padding)
        inputs = (rows, starts, torch.randn(8)) if weighted else (rows, starts)
        check_program(bags, inputs, change=decompose)


def _rows() -> Iterator[torch.Tensor]:
    yield torch.randn(3, 7)
    yield torch.randint(-2, 3, (4, 9))
    yield torch.randint(-2, 3, (4, 9)).float()
    yield torch.tensor([[1.0, math.nan, 1.0, -1.0, math.nan, 0.0]])
    yield torch.tensor(2.0)


@pytest.mark.parametrize("descending", [False, True])
def test_a_stable_sort_keeps_the_order_of_equals(descending: bool) -> None:
    for x, dim in itertools.product(_rows(), (0, -1)):
        target = ATEN.sort.stable
        check(target, x, stable=True, dim=dim, descending=descending)


def test_positions_among_sorted_elements() -> None:
    row, rows = torch.randn(9).sort()[0], torch.randint(-3, 4, (4, 5)).sort()[0]
    wanted = torch.cat([torch.randn(5), row[:3], torch.tensor([math.nan])])
    for right, narrow in itertools.product((False, True), (False, True)):
        options = {"right": right, "out_int32": narrow}
        check(ATEN.searchsorted.Tensor, row, wanted, **options)
        check(ATEN.searchsorted.Tensor, rows, torch.randint(-4, 5, (4, 6)), **options)
        check(ATEN.bucketize.Tensor, wanted.reshape(3, 3), row, **options)
    order = torch.randperm(9)
    check(ATEN.searchsorted.Tensor, row[order], wanted, sorter=order.argsort())


@pytest.mark.parametrize("target", RUNNING)
def test_running_results(target: Any) -> None:
    for x in _rows():
        for dim in range(max(x.dim(), 1)):
            check(target, x, dim)
    check(ATEN.cumprod.default, torch.randint(1, 3, (2, 3)), 1, dtype=torch.float32)


def test_negative_padding_cuts() -> None:
    x = torch.randn(2, 5, 4)
    for pad in itertools.product((-2, 0, 1), repeat=4):
        if min(pad) < 0:
            check(ATEN.constant_pad_nd.default, x, pad, 0.5)
        else:
            assert RULES[ATEN.constant_pad_nd.default](x, pad, 0.5) is NotImplemented


def test_integers_that_float64_cannot_hold() -> None:
    x = torch.tensor([2**53 + 1, 2**62 + 1, 7, 9, -(2**53) - 3, 2])
    for keepdim in (False, True):
        check(ATEN.sum.dim_IntList, x.reshape(2, 3), [1], keepdim)
    check(ATEN.remainder.Scalar_Tensor, 2**63 - 2, x)


X = torch.zeros(2)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (
            ATEN.convolution.default,
            (torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2), None, [1], [0], [1], False, [0], 1),
        ),
        (ATEN.avg_pool3d.default, (torch.ones(1, 1, 2, 2, 2, dtype=torch.int64), [2])),
        # Too many pairs.
        (ATEN.searchsorted.Tensor, (torch.zeros(2**14), torch.zeros(2**13))),
        (ATEN.scatter_reduce.two, (X, 0, X.long(), X, "prod")),
        (ATEN.histc.default, (torch.randn(4),)),
    ],
)
def test_what_a_rule_leaves_to_others(target: Any, args: tuple[Any, ...]) -> None:
    assert RULES[target](*args) is NotImplemented


ODD = torch.tensor([0.0, -0.0, 1.5, -2.5, math.inf, -math.inf, math.nan, 3e30])
PAIRS = tuple(torch.stack([*pair]) for pair in zip(*itertools.product(ODD, ODD), strict=True))
BOOLS = torch.tensor([[True, False, True, False]])


def test_two_elements_at_a_time() -> None:
    one, two = PAIRS
    # A hypotenuse does not overflow.
    known = ~(one.isnan() | two.isnan())
    check(ATEN.hypot.default, one[known], two[known])
    # Bools are sorted as numbers.
    check(ATEN.sort.stable, BOOLS, stable=True)


def test_counting_in_bins() -> None:
    for x in (torch.randn(4, 30), torch.randint(0, 6, (40,)).float()):
        check(ATEN.histc.default, x, 6, 0, 5)
        check(ATEN.histc.default, x, 4, -1, 1)


@pytest.mark.parametrize("corners", [False, True])
def test_sampling_a_volume(corners: bool) -> None:
    volume, grid = torch.randn(2, 3, 4, 5, 6), torch.randn(2, 3, 2, 4, 3) * 1.5
    for mode, padding in itertools.product((0, 1), (0, 1, 2)):
        check(ATEN.grid_sampler_3d.default, volume, grid, mode, padding, corners)


@pytest.mark.parametrize("rows", [3, 9])
def test_products_by_group(rows: int) -> None:
    weight, ends = torch.randn(4, 3, 2), torch.tensor([1, 1, rows - 1, rows - 1])
    x = torch.randn(rows, 3)
    wanted = torch.zeros(rows, 2)
    wanted[:1], wanted[1:-1] = x[:1] @ weight[0], x[1:-1] @ weight[2]
    torch.testing.assert_close(grouped_product(x, weight, ends), wanted)
    (rule,) = [r for t, r in expert_rules().items() if t is ATEN._grouped_mm.default]
    torch.testing.assert_close(rule(x, weight, ends), wanted)
    assert rule(x, weight[0], None) is NotImplemented


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_what_is_not_dropped_is_scaled(p: float) -> None:
    x = torch.randn(4000) + 3
    for train in (True, None):
        found, kept = dropout(x, p, train)
        assert abs((1 - kept.float()).mean() - p) < 0.05
        torch.testing.assert_close(found, torch.where(kept, x / (1 - p), 0.0))
    found, kept = dropout(x, p, False)
    assert kept.all()
    assert found.equal(x)


def test_every_quantization_asks_whether_its_dtype_holds_the_limits() -> None:
    x, scales, zeros = torch.ones(2, 4), torch.ones(2, 1), torch.zeros(2, 1)
    calls: tuple[Callable[..., torch.Tensor], ...] = (
        lambda *limits: _quantize(x, 0.5, 0, *limits),
        lambda *limits: _quantize_channels(x, scales[:, 0], zeros[:, 0], 0, *limits),
        lambda *limits: _quantize_per_token(x, scales, zeros, *limits),
    )
    for call in calls:
        assert call(0, 127, torch.int8).dtype == torch.int8
        with pytest.raises(ValueError, match="found integers of 0 to 255, expected -128 to 127"):
            call(0, 255, torch.int8)


@pytest.mark.parametrize("shape", [(1, 4), (1, 4, 1, 1), (3, 4), (2, 4, 5), (1, 4, 2, 3)])
def test_batch_norms_in_training_mode_are_eagers(shape: tuple[int, ...]) -> None:
    # torch.export fails on one number a channel: torch's own rule divides by zero.
    operator = torch.ops.aten._native_batch_norm_legit_functional.default
    x, weight, bias = torch.randn(shape).double(), torch.randn(4).double(), torch.randn(4).double()
    state = torch.randn(4).double(), torch.rand(4).double()
    expected = operator(x, weight, bias, *state, True, 0.1, 1e-5)
    results = BATCH_NORMS[operator](x, weight, bias, *state, True, 0.1, 1e-5)
    torch.testing.assert_close(results, expected, equal_nan=True)


def test_rolls_of_whole_windows_are_slices_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is traced.
    monkeypatch.setattr("lowerdeck.decompose.decompose_graph", None)

    def windows(x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x] * 4, 1)
        return x.roll((-3, 2), (1, -2)) + x.roll(4, 1)

    rows = {0: torch.export.Dim.AUTO(max=9), 1: torch.export.Dim.AUTO(max=9)}
    inputs = [(torch.randn(size),) for size in ((3, 5, 4), (2, 6, 4), (4, 2, 4))]
    emitted = check_program(windows, *inputs, dynamic_shapes=((rows,),))
    assert "aten::roll" not in {each.name for each in emitted.program.execution_plan[0].operators}
    # Slices of sizes that may be 0 have other sizes then.
    rows = {0: torch.export.Dim("rows", min=0, max=9), 1: torch.export.Dim("more", min=0, max=9)}
    inputs = [(torch.randn(size),) for size in ((3, 5, 4), (2, 0, 4), (0, 2, 4))]
    emitted = check_program(windows, *inputs, dynamic_shapes=((rows,),))
    assert "aten::roll" in {each.name for each in emitted.program.execution_plan[0].operators}
