"""Whatever dimension is 0, from the start or only at run time, the numbers are eager's.

Each row is one operator with one dimension called ``N``. The arena is dirtied first, so that a
kernel which leaves its output unwritten shows what was there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from lowerdeck.emitter import UnsupportedError, emit
from lowerdeck_zoo import official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

Function = Callable[..., Any]
Shape = tuple[int, ...]
N = -1
MOST = 8


def _index(x: torch.Tensor) -> torch.Tensor:
    return x.abs().long().clamp(max=2)


OPERATORS: dict[str, tuple[Function, list[Shape]]] = {
    "mm": (lambda a, b: a @ b, [(3, N), (N, 4)]),
    "mm_outer": (lambda a, b: a @ b, [(N, 3), (3, 4)]),
    "bmm": (torch.bmm, [(2, 3, N), (2, N, 4)]),
    "bmm_b": (torch.bmm, [(N, 3, 2), (N, 2, 4)]),
    "mv": (lambda a, b: a @ b, [(3, N), (N,)]),
    "dot": (lambda a, b: a @ b, [(N,), (N,)]),
    "addmm": (torch.addmm, [(4,), (3, N), (N, 4)]),
    "addmm_beta": (
        lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=0.5),
        [(3, 4), (3, N), (N, 4)],
    ),
    "baddbmm": (torch.baddbmm, [(2, 3, 4), (2, 3, N), (2, N, 4)]),
    "linear": (nn.functional.linear, [(3, N), (4, N)]),
    "linear_bias": (nn.functional.linear, [(3, N), (4, N), (4,)]),
    "linear_rows": (nn.functional.linear, [(N, 3), (4, 3), (4,)]),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), [(2, 3, N), (2, 4, N)]),
    "sdpa": (
        nn.functional.scaled_dot_product_attention,
        [(1, 2, 3, 4), (1, 2, N, 4), (1, 2, N, 4)],
    ),
    "sum": (lambda a: a.sum(1), [(3, N)]),
    "sum_keep": (lambda a: a.sum(1, keepdim=True), [(3, N)]),
    "sum_all": (lambda a: a.sum(), [(3, N)]),
    "sum_other": (lambda a: a.sum(0), [(3, N)]),
    "mean": (lambda a: a.mean(1), [(3, N)]),
    "mean_all": (lambda a: a.mean(), [(3, N)]),
    "mean_other": (lambda a: a.mean(0), [(3, N)]),
    "prod": (lambda a: a.prod(1), [(3, N)]),
    "prod_all": (lambda a: a.prod(), [(3, N)]),
    "var": (lambda a: a.var(1), [(3, N)]),
    "var0": (lambda a: a.var(1, correction=0), [(3, N)]),
    "var_all": (lambda a: a.var(), [(3, N)]),
    "std": (lambda a: a.std(1), [(3, N)]),
    "var_mean": (lambda a: torch.var_mean(a, 1), [(3, N)]),
    "any": (lambda a: (a > 0).any(1), [(3, N)]),
    "any_all": (lambda a: (a > 0).any(), [(3, N)]),
    "all": (lambda a: (a > 0).all(1), [(3, N)]),
    "all_all": (lambda a: (a > 0).all(), [(3, N)]),
    "norm": (lambda a: torch.linalg.vector_norm(a, dim=1), [(3, N)]),
    "norm1": (lambda a: torch.linalg.vector_norm(a, 1, dim=1), [(3, N)]),
    "norm0": (lambda a: torch.linalg.vector_norm(a, 0, dim=1), [(3, N)]),
    "logsumexp": (lambda a: a.logsumexp(1), [(3, N)]),
    "nansum": (lambda a: a.nansum(1), [(3, N)]),
    "count_nonzero": (lambda a: a.count_nonzero(1), [(3, N)]),
    "amax_other": (lambda a: a.amax(0), [(3, N)]),
    "max_other": (lambda a: a.max(0), [(3, N)]),
    "min_other": (lambda a: a.min(0), [(3, N)]),
    "argmax_other": (lambda a: a.argmax(0), [(3, N)]),
    "topk_other": (lambda a: a.topk(2, 0), [(3, N)]),
    "sort": (lambda a: a.sort(1), [(3, N)]),
    "sort_other": (lambda a: a.sort(0), [(3, N)]),
    "argsort": (lambda a: a.argsort(1), [(3, N)]),
    "cumsum": (lambda a: a.cumsum(1), [(3, N)]),
    "softmax": (lambda a: a.softmax(1), [(3, N)]),
    "softmax_other": (lambda a: a.softmax(0), [(3, N)]),
    "log_softmax": (lambda a: a.log_softmax(1), [(3, N)]),
    "log_softmax64": (lambda a: a.double().log_softmax(1), [(3, N)]),
    "nonzero_tuple": (lambda a: a.nonzero(as_tuple=True), [(3, N)]),
    "where_one": (lambda a: torch.where(a > 0), [(3, N)]),
    "cat": (lambda a, b: torch.cat([a, b], 1), [(3, N), (3, 4)]),
    "cat_both": (lambda a, b: torch.cat([a, b], 1), [(3, N), (3, N)]),
    "cat_one": (lambda a: torch.cat([a], 1), [(3, N)]),
    "cat_other": (lambda a, b: torch.cat([a, b], 0), [(3, N), (2, N)]),
    "cat_int": (lambda a, b: torch.cat([a, b.long()], 1), [(3, N), (3, 4)]),
    "cat1d": (lambda a, b: torch.cat([a, b]), [(N,), (4,)]),
    "cat_nonzero": (lambda a, b: torch.cat([a.nonzero().float(), b]), [(3, N), (4, 2)]),
    "stack": (lambda a, b: torch.stack([a, b], 1), [(3, N), (3, N)]),
    "stack0": (lambda a, b: torch.stack([a, b], -1), [(3, N), (3, N)]),
    "conv1d_batch": (lambda a, w: nn.functional.conv1d(a, w, padding=1), [(N, 2, 5), (3, 2, 3)]),
    "conv2d_batch": (
        lambda a, w: nn.functional.conv2d(a, w, padding=1),
        [(N, 2, 5, 5), (3, 2, 3, 3)],
    ),
    "convT": (nn.functional.conv_transpose2d, [(N, 2, 5, 5), (2, 3, 3, 3)]),
    "maxpool": (lambda a: nn.functional.max_pool2d(a, 2), [(N, 2, 4, 4)]),
    "maxpool1": (lambda a: nn.functional.max_pool1d(a, 2), [(N, 2, 4)]),
    "avgpool": (lambda a: nn.functional.avg_pool2d(a, 2), [(N, 2, 4, 4)]),
    "avgpool1": (lambda a: nn.functional.avg_pool1d(a, 2), [(N, 2, 4)]),
    "adaptive": (lambda a: nn.functional.adaptive_avg_pool2d(a, 2), [(N, 2, 4, 4)]),
    "adaptive1": (lambda a: nn.functional.adaptive_avg_pool2d(a, 1), [(N, 2, 4, 4)]),
    "adaptive_max": (lambda a: nn.functional.adaptive_max_pool2d(a, 2), [(N, 2, 4, 4)]),
    "avgpool3": (lambda a: nn.functional.avg_pool3d(a, 2), [(N, 2, 4, 4, 4)]),
    "layernorm": (lambda a: nn.functional.layer_norm(a, (4,)), [(N, 4)]),
    "groupnorm": (lambda a: nn.functional.group_norm(a, 2), [(N, 4, 3)]),
    "batchnorm": (nn.functional.batch_norm, [(N, 4, 3), (4,), (4,)]),
    "instancenorm": (nn.functional.instance_norm, [(N, 4, 3)]),
    "rmsnorm": (lambda a: nn.functional.rms_norm(a, (4,)), [(N, 4)]),
    "index": (lambda a, i: a[:, _index(i)], [(3, 4), (N,)]),
    "index_empty": (lambda a, i: a[_index(i)], [(3, N), (2,)]),
    "index_select": (lambda a, i: a.index_select(0, _index(i)), [(3, N), (N,)]),
    "gather": (lambda a, i: a.gather(1, _index(i)), [(3, 4), (3, N)]),
    "embedding": (lambda a, i: nn.functional.embedding(_index(i), a), [(3, 4), (N,)]),
    "embedding_d": (lambda a, i: nn.functional.embedding(_index(i), a), [(3, N), (5,)]),
    "embedding_bag": (
        lambda a, i: nn.functional.embedding_bag(_index(i), a, torch.tensor([0, 0])),
        [(3, 4), (N,)],
    ),
    "scatter": (
        lambda a, i, s: a.scatter(1, i.abs().long().clamp(max=0), s),
        [(3, 4), (3, N), (3, N)],
    ),
    "scatter_add": (lambda a, i, s: a.scatter_add(1, _index(i), s), [(3, 4), (3, N), (3, N)]),
    "scatter_self": (lambda a, i, s: a.scatter_add(0, _index(i), s), [(3, N), (2, N), (2, N)]),
    "scatter_reduce": (
        lambda a, i, s: a.scatter_reduce(1, _index(i), s, "amax"),
        [(3, 4), (3, N), (3, N)],
    ),
    "index_add": (lambda a, i, s: a.index_add(0, _index(i), s), [(3, 4), (N,), (N, 4)]),
    "index_put": (lambda a, i, s: a.index_put((_index(i),), s), [(3, 4), (N,), (N, 4)]),
    "index_put_acc": (
        lambda a, i, s: a.index_put((_index(i),), s, accumulate=True),
        [(3, 4), (N,), (N, 4)],
    ),
    "index_copy": (lambda a, i, s: a.index_copy(0, _index(i), s), [(3, 4), (N,), (N, 4)]),
    "index_fill": (lambda a, i: a.index_fill(0, _index(i), 3.0), [(3, 4), (N,)]),
    "masked_select": (lambda a: a.masked_select(a > 0), [(3, N)]),
    "masked_fill": (lambda a: a.masked_fill(a > 0, 1), [(3, N)]),
    "masked_scatter": (lambda a, b: a.masked_scatter(a > 100, b), [(3, 4), (N,)]),
    "nonzero": (lambda a: a.nonzero(), [(3, N)]),
    "slice_scatter": (lambda a, b: a.slice_scatter(b, 1, 0, b.shape[1]), [(3, 9), (3, N)]),
    "select_scatter": (lambda a, b: a.select_scatter(b, 0, 1), [(3, N), (N,)]),
    "select": (lambda a: a[1], [(3, N)]),
    "pad": (lambda a: nn.functional.pad(a, (1, 2)), [(3, N)]),
    "pad_other": (lambda a: nn.functional.pad(a, (0, 0, 1, 2)), [(3, N)]),
    "refl_pad": (lambda a: nn.functional.pad(a, (1, 1), mode="reflect"), [(N, 2, 4)]),
    "repl_pad": (lambda a: nn.functional.pad(a, (1, 1), mode="replicate"), [(N, 2, 4)]),
    "circ_pad": (lambda a: nn.functional.pad(a, (1, 1), mode="circular"), [(N, 2, 4)]),
    "repeat": (lambda a: a.repeat(2, 3), [(3, N)]),
    "expand": (lambda a: a.expand(2, 3, a.shape[1]).clone(), [(3, N)]),
    "repeat_interleave": (lambda a: a.repeat_interleave(2, 1), [(3, N)]),
    "flip": (lambda a: a.flip(1), [(3, N)]),
    "roll": (lambda a: a.roll(1, 1), [(3, N)]),
    "tril": (lambda a: a.tril(), [(3, N)]),
    "triu": (lambda a: a.triu(), [(3, N)]),
    "permute": (lambda a: a.permute(1, 0).clone(), [(3, N)]),
    "view": (lambda a: (a + 1).view(-1), [(3, N)]),
    "split": (lambda a: a.split(2, 0), [(3, N)]),
    "chunk": (lambda a: a.chunk(3, 0), [(3, N)]),
    "unbind": (lambda a: a.unbind(0), [(3, N)]),
    "unfold": (lambda a: a.unfold(0, 2, 1), [(3, N)]),
    "where": (lambda a: torch.where(a > 0, a, 1.0), [(3, N)]),
    "bcast": (lambda a, b: a + b, [(3, 1), (3, N)]),
    "bcast_mul0": (lambda a, b: a * b, [(N, 1), (1, 4)]),
    "cdist": (torch.cdist, [(3, N), (4, N)]),
    "cdist_rows": (torch.cdist, [(N, 3), (4, 3)]),
    "cdist1": (lambda a, b: torch.cdist(a, b, p=1), [(3, N), (4, N)]),
    "pdist": (torch.pdist, [(3, N)]),
    "cosine": (lambda a, b: nn.functional.cosine_similarity(a, b, dim=1), [(3, N), (3, N)]),
    "pixel_shuffle": (lambda a: nn.functional.pixel_shuffle(a, 2), [(N, 4, 2, 2)]),
    "upsample": (lambda a: nn.functional.interpolate(a, scale_factor=2.0), [(N, 1, 4, 4)]),
    "upsample_bi": (
        lambda a: nn.functional.interpolate(a, scale_factor=2.0, mode="bilinear"),
        [(N, 1, 4, 4)],
    ),
    "grid": (nn.functional.grid_sample, [(N, 1, 4, 4), (N, 2, 2, 2)]),
    "grid_points": (nn.functional.grid_sample, [(1, 1, 4, 4), (1, 2, N, 2)]),
    "diag": (lambda a: torch.diagonal(a).clone(), [(3, N)]),
    "trace": (torch.trace, [(3, N)]),
    "outer": (torch.outer, [(N,), (4,)]),
    "glu": (lambda a: nn.functional.glu(a, 1), [(N, 4)]),
    "arange": (lambda a: torch.arange(a.shape[1]), [(3, N)]),
    "full": (lambda a: torch.full((a.shape[1], 2), 3.0), [(3, N)]),
    "mse": (nn.functional.mse_loss, [(3, N), (3, N)]),
    "xent": (
        lambda a, b: nn.functional.cross_entropy(a, b.abs().long().clamp(max=3)),
        [(N, 4), (N,)],
    ),
    "isin": (torch.isin, [(3, 4), (N,)]),
    "multi": (lambda a: a.sum(1) + a.amax(0).sum(), [(3, N)]),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 2), [(3, 2, N), (2, N, 4)]),
    "int_mm": (lambda a, b: a.long() @ b.long(), [(3, N), (N, 4)]),
    "any_other": (lambda a: (a > 0).any(0), [(3, N)]),
    "prod_other": (lambda a: a.prod(0), [(3, N)]),
    "var_other": (lambda a: a.var(0), [(3, N)]),
    "cumsum_other": (lambda a: a.cumsum(0), [(3, N)]),
}

# torch raises for these as soon as there is nothing to choose from, but exports them.
OF_NOTHING: dict[str, Function] = {"max": torch.max, "min": torch.min}
# And for these where only the run time tells: the program gives the identity of the reduction.
IDENTITIES: dict[str, tuple[Function, float]] = {
    "amax": (lambda a: a.amax(1), float("-inf")),
    "amin": (lambda a: a.amin(1), float("inf")),
    "max": (lambda a: a.max(), float("-inf")),
    "min": (lambda a: a.min(), float("inf")),
}


class _Of(nn.Module):
    """Dirties memory that is free again before ``function`` runs."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, noise: torch.Tensor, *args: torch.Tensor) -> Any:
        return noise.exp().sum(), self.function(*args)


def _args(shapes: list[Shape], size: int) -> tuple[torch.Tensor, ...]:
    made = [torch.randn([size if dim == N else dim for dim in shape]) for shape in shapes]
    return (torch.full((512,), 3.0), *made)


def _export(
    function: Function, shapes: list[Shape], size: int | None
) -> torch.export.ExportedProgram:
    """Return the program whose N is ``size``, or varies from 0 on."""
    varying = Dim("rows", min=0, max=MOST)
    dims = [{i: varying for i, dim in enumerate(s) if dim == N} or None for s in shapes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if size is not None:
            return torch.export.export(_Of(function), _args(shapes, size))
        given = _args(shapes, 3)
        return torch.export.export(_Of(function), given, dynamic_shapes=(None, tuple(dims)))


def _compare(
    program: Any, function: Function, shapes: list[Shape], sizes: list[int], folder: Path
) -> None:
    """Raise unless the runtime gives eager's numbers for each size in turn, however loaded."""
    emitted = emit(program)
    emitted.save(folder / "model.pte")
    calls = [_args(shapes, size) for size in sizes]
    for file in (emitted.to_bytes(), folder / "model.pte"):
        outcome = official.run(file, [official.Call(args) for args in calls])
        assert isinstance(outcome, official.Ran), outcome
        for args, got in zip(calls, outcome.outputs, strict=True):
            wanted = pytree.tree_leaves(function(*args[1:]))
            for one, other in zip(got[1:], wanted, strict=True):
                torch.testing.assert_close(one, other, equal_nan=True, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_dimension_that_is_0_from_the_start(name: str, tmp_path: Path) -> None:
    function, shapes = OPERATORS[name]
    _compare(_export(function, shapes, 0), function, shapes, [0], tmp_path)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_dimension_that_becomes_0_at_run_time(name: str, tmp_path: Path) -> None:
    function, shapes = OPERATORS[name]
    program = _export(function, shapes, None)
    _compare(program, function, shapes, [MOST, 0, 3, 1, 0, 2], tmp_path)


@pytest.mark.parametrize("name", OF_NOTHING)
def test_what_torch_raises_for_is_refused_by_name(name: str) -> None:
    program = _export(OF_NOTHING[name], [(3, N)], 0)
    with pytest.raises(UnsupportedError, match=rf"{name} of a tensor without elements.*\(3, 0\)"):
        emit(program)


@pytest.mark.parametrize("name", IDENTITIES)
def test_a_reduction_of_nothing_at_run_time_gives_its_identity(name: str) -> None:
    function, identity = IDENTITIES[name]
    program = _export(function, [(3, N)], None)
    outcome = official.run(emit(program).to_bytes(), [official.Call(_args([(3, N)], 0))])
    assert isinstance(outcome, official.Ran), outcome
    (found,) = outcome.outputs[0][1:]
    assert torch.equal(found, torch.full_like(found, identity))


def test_a_size_that_is_never_0_costs_no_branch() -> None:
    function, shapes = OPERATORS["mm"]
    varying = Dim("rows", min=1, max=MOST)
    dims = (None, ({1: varying}, {0: varying}))
    program = torch.export.export(_Of(function), _args(shapes, 3), dynamic_shapes=dims)
    (plan,) = emit(program).program.execution_plan
    assert "executorch_prim::eq" not in [operator.name for operator in plan.operators]
