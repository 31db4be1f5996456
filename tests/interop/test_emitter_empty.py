"""Whatever dimension is 0, from the start or only at run time, the numbers are eager's.

Each row of functions takes tensors of some shapes with one dimension called ``N``. The arena is
dirtied first, so that a kernel which leaves its output unwritten shows what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch import Tensor
from torch.export import Dim
from torch.utils import _pytree as pytree

from lowerdeck.emitter import emit
from lowerdeck_zoo import Of, assert_close, exported, official
from tests.interop.functions_together import run_together

Function = Callable[..., Any]
Shape = tuple[int, ...]
N = -1
MOST = 8
SIZES = (MOST, 0, 3, 1, 0, 2)
norm = torch.linalg.vector_norm


def _index(x: Tensor, most: int = 2) -> Tensor:
    return x.abs().long().clamp(max=most)


# Of (3, N): what is summed over N, then what is not.
REDUCTIONS: dict[str, Function] = {
    "sums": lambda a: (a.sum(1), a.sum(1, keepdim=True), a.sum(), a.nansum(1)),
    "means": lambda a: (a.mean(1), a.mean(), a.prod(1), a.prod(), a.count_nonzero(1)),
    "variances": lambda a: (a.var(1), a.var(1, correction=0), a.var(), a.std(1)),
    "var_mean": lambda a: (torch.var_mean(a, 1), a.logsumexp(1)),
    "bools": lambda a: ((a > 0).any(1), (a > 0).any(), (a > 0).all(1), (a > 0).all()),
    "norms": lambda a: (norm(a, dim=1), norm(a, 1, dim=1), norm(a, 0, dim=1)),
    "sorted": lambda a: (a.sort(1), a.argsort(1), a.cumsum(1)),
    "softmax": lambda a: (a.softmax(1), a.log_softmax(1), a.double().log_softmax(1)),
    "nonzero": lambda a: (a.nonzero(), a.nonzero(as_tuple=True), torch.where(a > 0)),
    "masked": lambda a: (a.masked_select(a > 0), a.masked_fill(a > 0, 1)),
    "other sums": lambda a: (a.sum(0), a.mean(0), a.prod(0), a.var(0), a.cumsum(0)),
    "other maxima": lambda a: (a.amax(0), a.max(0), a.min(0), a.argmax(0), (a > 0).any(0)),
    "other orders": lambda a: (a.topk(2, 0), a.sort(0), a.softmax(0), a.sum(1) + a.amax(0).sum()),
    "views": lambda a: (
        (a + 1).view(-1),
        a.permute(1, 0).clone(),
        a[1],
        torch.diagonal(a).clone(),
    ),
    "lists": lambda a: (a.split(2, 0), a.chunk(3, 0), a.unbind(0), a.unfold(0, 2, 1)),
    "repeats": lambda a: (a.repeat(2, 3), a.repeat_interleave(2, 1), torch.cat([a], 1)),
    "moves": lambda a: (a.expand(2, 3, a.shape[1]).clone(), a.flip(1), a.roll(1, 1)),
    "triangles": lambda a: (a.tril(), a.triu(), torch.trace(a), torch.pdist(a)),
    "pads": lambda a: (F.pad(a, (1, 2)), F.pad(a, (0, 0, 1, 2)), torch.where(a > 0, a, 1.0)),
    "made": lambda a: (torch.arange(a.shape[1]), torch.full((a.shape[1], 2), 3.0)),
}
IMAGES: dict[str, Function] = {
    "max pools": lambda a: (F.max_pool2d(a, 2), F.adaptive_max_pool2d(a, 2)),
    "average pools": lambda a: (F.avg_pool2d(a, 2), F.adaptive_avg_pool2d(a, 2)),
    "adaptive pools": lambda a: F.adaptive_avg_pool2d(a, 1),
    "upsampling": lambda a: (F.interpolate(a, scale_factor=2.0), F.pixel_shuffle(a, 2)),
    "bilinear": lambda a: F.interpolate(a, scale_factor=2.0, mode="bilinear"),
}
ROWS: dict[str, Function] = {
    "pools": lambda a: (F.max_pool1d(a, 2), F.avg_pool1d(a, 2)),
    "norms": lambda a: (F.layer_norm(a, (4,)), F.rms_norm(a, (4,)), F.glu(a, 1)),
    "group norms": lambda a: (F.group_norm(a, 2), F.instance_norm(a)),
    "reflect": lambda a: F.pad(a, (1, 1), mode="reflect"),
    "replicate": lambda a: F.pad(a, (1, 1), mode="replicate"),
    "circular": lambda a: F.pad(a, (1, 1), mode="circular"),
}
# Functions of other shapes: one line for each.
OTHERS: dict[str, tuple[Function, list[Shape]]] = {
    "mm": (lambda a, b: (a @ b, a.long() @ b.long()), [(3, N), (N, 4)]),
    "mm_outer": (lambda a, b: a @ b, [(N, 3), (3, 4)]),
    "bmm": (torch.bmm, [(2, 3, N), (2, N, 4)]),
    "bmm_b": (torch.bmm, [(N, 3, 2), (N, 2, 4)]),
    "mv": (lambda a, b: a @ b, [(3, N), (N,)]),
    "dot": (lambda a, b: a @ b, [(N,), (N,)]),
    "addmm": (torch.addmm, [(4,), (3, N), (N, 4)]),
    "addmm_beta": (lambda *x: torch.addmm(*x, beta=2, alpha=0.5), [(3, 4), (3, N), (N, 4)]),
    "baddbmm": (torch.baddbmm, [(2, 3, 4), (2, 3, N), (2, N, 4)]),
    "linear": (lambda a, b, c: (F.linear(a, b), F.linear(a, b, c)), [(3, N), (4, N), (4,)]),
    "linear_rows": (F.linear, [(N, 3), (4, 3), (4,)]),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), [(2, 3, N), (2, 4, N)]),
    "sdpa": (F.scaled_dot_product_attention, [(1, 2, 3, 4), (1, 2, N, 4), (1, 2, N, 4)]),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 2), [(3, 2, N), (2, N, 4)]),
    "cat": (lambda a, b: (torch.cat([a, b], 1), torch.cat([a, b.long()], 1)), [(3, N), (3, 4)]),
    "cat_both": (lambda a, b: (torch.cat([a, b], 1), torch.stack([a, b], 1)), [(3, N), (3, N)]),
    "stack": (lambda a, b: (torch.stack([a, b], -1), F.mse_loss(a, b)), [(3, N), (3, N)]),
    "cosine": (lambda a, b: F.cosine_similarity(a, b, dim=1), [(3, N), (3, N)]),
    "cat_other": (lambda a, b: torch.cat([a, b], 0), [(3, N), (2, N)]),
    "cat1d": (lambda a, b: (torch.cat([a, b]), torch.outer(a, b)), [(N,), (4,)]),
    "cat_nonzero": (lambda a, b: torch.cat([a.nonzero().float(), b]), [(3, N), (4, 2)]),
    "conv1d": (lambda a, w: F.conv1d(a, w, padding=1), [(N, 2, 5), (3, 2, 3)]),
    "conv2d": (lambda a, w: F.conv2d(a, w, padding=1), [(N, 2, 5, 5), (3, 2, 3, 3)]),
    "conv_transpose": (F.conv_transpose2d, [(N, 2, 5, 5), (2, 3, 3, 3)]),
    "avgpool3": (lambda a: F.avg_pool3d(a, 2), [(N, 2, 4, 4, 4)]),
    "batchnorm": (F.batch_norm, [(N, 4, 3), (4,), (4,)]),
    "layer_norm": (lambda a: (F.layer_norm(a, (4,)), F.glu(a, 1)), [(N, 4)]),
    "index": (lambda a, i: (a[:, _index(i)], torch.isin(a, i)), [(3, 4), (N,)]),
    "index_empty": (lambda a, i: a[_index(i)], [(3, N), (2,)]),
    "index_select": (lambda a, i: a.index_select(0, _index(i)), [(3, N), (N,)]),
    "gather": (lambda a, i: a.gather(1, _index(i)), [(3, 4), (3, N)]),
    "embedding": (lambda a, i: F.embedding(_index(i), a), [(3, 4), (N,)]),
    "embedding_d": (lambda a, i: F.embedding(_index(i), a), [(3, N), (5,)]),
    "bag": (lambda a, i: F.embedding_bag(_index(i), a, torch.tensor([0, 0])), [(3, 4), (N,)]),
    "scatter": (lambda a, i, s: a.scatter(1, _index(i, 0), s), [(3, 4), (3, N), (3, N)]),
    "scatter_add": (lambda a, i, s: a.scatter_add(1, _index(i), s), [(3, 4), (3, N), (3, N)]),
    "scatter_self": (lambda a, i, s: a.scatter_add(0, _index(i), s), [(3, N), (2, N), (2, N)]),
    "amax": (lambda a, i, s: a.scatter_reduce(1, _index(i), s, "amax"), [(3, 4), (3, N), (3, N)]),
    "index_add": (lambda a, i, s: a.index_add(0, _index(i), s), [(3, 4), (N,), (N, 4)]),
    "index_put": (lambda a, i, s: a.index_put((_index(i),), s), [(3, 4), (N,), (N, 4)]),
    "put": (lambda a, i, s: a.index_put((_index(i),), s, True), [(3, 4), (N,), (N, 4)]),
    "index_copy": (lambda a, i, s: a.index_copy(0, _index(i), s), [(3, 4), (N,), (N, 4)]),
    "index_fill": (lambda a, i: a.index_fill(0, _index(i), 3.0), [(3, 4), (N,)]),
    "masked_scatter": (lambda a, b: a.masked_scatter(a > 100, b), [(3, 4), (N,)]),
    "slice_scatter": (lambda a, b: a.slice_scatter(b, 1, 0, b.shape[1]), [(3, 9), (3, N)]),
    "select_scatter": (lambda a, b: a.select_scatter(b, 0, 1), [(3, N), (N,)]),
    "broadcast": (lambda a, b: a + b, [(3, 1), (3, N)]),
    "broadcast_mul": (lambda a, b: a * b, [(N, 1), (1, 4)]),
    "cdist": (lambda a, b: (torch.cdist(a, b), torch.cdist(a, b, p=1)), [(3, N), (4, N)]),
    "cdist_rows": (torch.cdist, [(N, 3), (4, 3)]),
    "grid": (F.grid_sample, [(N, 1, 4, 4), (N, 2, 2, 2)]),
    "grid_points": (F.grid_sample, [(1, 1, 4, 4), (1, 2, N, 2)]),
    "cross_entropy": (lambda a, b: F.cross_entropy(a, _index(b, 3)), [(N, 4), (N,)]),
}
TABLE: dict[str, tuple[Function, list[Shape]]] = {
    **{f"(3, N), {name}": (function, [(3, N)]) for name, function in REDUCTIONS.items()},
    **{f"images, {name}": (function, [(N, 4, 4, 4)]) for name, function in IMAGES.items()},
    **{f"rows, {name}": (function, [(N, 4, 4)]) for name, function in ROWS.items()},
    **OTHERS,
}
NAMES = [*TABLE]
# Several in one program, to save the time of exporting each.
PARTS = [NAMES[first::6] for first in range(6)]


def _args(names: Sequence[str], size: int) -> list[Any]:
    shapes = [TABLE[name][1] for name in names]
    made = [
        [torch.randn([size if n == N else n for n in shape]) for shape in row] for row in shapes
    ]
    return [torch.full((8192,), 3.0), *made]


def _functions(names: Sequence[str]) -> dict[str, Function]:
    """Return functions of all arguments, the first of which dirties memory that is free again."""

    def of(place: int, name: str) -> Function:
        return lambda noise, *args: TABLE[name][0](*args[place])

    functions = {name: of(place, name) for place, name in enumerate(names)}
    return {"noise": lambda noise, *args: noise.exp().sum(), **functions}


def _compare(names: Sequence[str], sizes: Sequence[int], **options: Any) -> None:
    calls = [_args(names, size) for size in sizes]
    # torch's own kernels, which the runner calls, refuse some of these.
    for result in run_together(_functions(names), *calls, ours=False, **options):
        expected = pytree.tree_leaves(result.function(*result.args))
        try:
            assert_close(result.outputs, expected, atol=1e-4, rtol=1e-4)
        except AssertionError as error:
            raise AssertionError(result.where) from error


def _varying(names: Sequence[str], least: int) -> Any:
    size = Dim("size", min=least, max=MOST)
    shapes = [TABLE[name][1] for name in names]
    dims = [[{i: size for i, n in enumerate(s) if n == N} or None for s in row] for row in shapes]
    return ((None, *dims),)


@pytest.mark.parametrize("names", PARTS, ids=lambda names: names[0])
def test_a_dimension_that_is_0_from_the_start(names: list[str]) -> None:
    _compare(names, [0])


@pytest.mark.parametrize("names", PARTS, ids=lambda names: names[0])
def test_a_dimension_that_becomes_0_at_run_time(names: list[str]) -> None:
    _compare(names, (3, *SIZES), dynamic_shapes=_varying(names, 0))


def test_reductions_of_nothing_at_run_time_give_their_identity() -> None:
    everything = Of(lambda a: (a.amax(1), a.max(), a.amin(1), a.min()))
    sizes = (({1: Dim("size", min=0, max=MOST)},),)
    content = emit(exported(everything, torch.ones(3, 2), dynamic_shapes=sizes)).to_bytes()
    outcome = official.run(content, [official.Call((torch.ones(3, size),)) for size in (8, 0)])
    assert isinstance(outcome, official.Ran), outcome
    for found, sign in zip(outcome.outputs[1], (-1, -1, 1, 1), strict=True):
        assert torch.equal(found, torch.full_like(found, sign * float("inf")))


def test_a_size_that_is_never_0_costs_no_branch() -> None:
    program = exported(
        *(Of(_functions(["mm"])["mm"]), *_args(["mm"], 3)), dynamic_shapes=_varying(["mm"], 1)
    )
    (plan,) = emit(program).program.execution_plan
    assert "executorch_prim::eq" not in [operator.name for operator in plan.operators]
