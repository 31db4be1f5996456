"""Sums, products and norms keep their type's digits: integers exact, floats as eager's are.

Each program computes many functions in one type; all that eager computes must be emitted, run in
the official runtime and agree with a wider type as well as eager does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.interop.functions_together import computed, run_together

Function = Callable[[Tensor], Any]
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
DIMS: tuple[Any, ...] = (-1, 1, (1, 2), (0, 2), (0, 1, 2))
INDEX = torch.arange(16) % 3


def over(function: Callable[[Tensor, Any], Any]) -> Function:
    """Return a function that reduces over each set of dimensions."""
    return lambda x: [function(x, dims) for dims in DIMS]


def rows(x: Tensor) -> Tensor:
    return x.flatten(1).contiguous()


# Of x, shape (3, 16, N): what any type can be added up by.
SUMS: dict[str, Function] = {
    "sum": over(torch.sum),
    "sums": lambda x: (x.sum(), x.sum(1, keepdim=True), x.sum((0, 2), keepdim=True)),
    "sum in int64": lambda x: x.sum(-1, dtype=torch.int64) if not x.is_floating_point() else x,
    "sum in float64": lambda x: (x.sum(-1, dtype=torch.float64), x.sum(dtype=torch.float64)),
    "running sum": lambda x: (x.cumsum(-1), x.cumsum(0)),
    "trace": lambda x: x[0, :, :16].trace(),
    "scatter_add": lambda x: (
        torch.scatter_add(x[0], 0, INDEX[:, None].expand(16, x.shape[2]), x[1]),
        torch.scatter_add(x[0, 0], 0, torch.zeros(x.shape[2], dtype=torch.int64), x[0, 1]),
    ),
    "index_add": lambda x: torch.index_add(x[0], 0, INDEX, x[1]),
    "product": lambda x: (x[:, :, :6].prod(-1), x[:, :3, 0].prod()),
    "running product": lambda x: x[:, :, :6].cumprod(-1),
    "long products": lambda x: (
        torch.mm(rows(x), rows(x).mT.contiguous()),
        torch.addmm(x[0, 0, :3], rows(x), rows(x).mT.contiguous()),
        F.linear(rows(x), rows(x), x[0, 0, :3]),
    ),
    "mm": lambda x: torch.mm(x[0], x[1].mT.contiguous()),
    "bmm": lambda x: torch.bmm(x, x.mT.contiguous()),
    "addmm": lambda x: torch.addmm(x[2, :, :16], x[0], x[1].mT.contiguous()),
    "linear": lambda x: (F.linear(x, x[0], x[1, :, 0]), F.linear(x[0], x[1])),
    "addmm with factors": lambda x: torch.addmm(
        x[2, 0, :16], x[0], x[1].mT.contiguous(), beta=2, alpha=3
    ),
    "dot": lambda x: torch.dot(x[0, 0], x[0, 1]),
    "mv": lambda x: torch.mv(x[0], x[0, 0]),
    "scatter sum": lambda x: torch.scatter_reduce(x[0, 0], 0, INDEX, x[0, 1], "sum"),
    "index_put": lambda x: torch.index_put(x[0], (INDEX,), x[1], accumulate=True),
    "convolution": lambda x: (
        F.conv1d(x, x[:, :, :3].contiguous()),
        F.conv2d(x[None], x[None, :, :3, :3].contiguous()),
    ),
}
# Of floats alone; torch computes the distances with float32 and float64 only.
REALS: dict[str, Function] = {
    "mean": over(torch.mean),
    "mean of all": torch.mean,
    "average pools": lambda x: (
        *(F.avg_pool1d(x, 64), F.avg_pool2d(x, 16), F.adaptive_avg_pool1d(x, 3)),
        *(F.adaptive_avg_pool2d(x, (3, 2)), F.adaptive_avg_pool2d(x, 1)),
    ),
    "norms of vectors": over(lambda x, d: [torch.linalg.vector_norm(x, p, d) for p in (1, 2, 3)]),
    "variance": over(lambda x, d: (x.var(d), x.std(d), torch.var_mean(x, d))),
    "variance that keeps": lambda x: (x.var(-1, keepdim=True), x.var((1, 2), correction=0)),
    "transposed convolution": lambda x: F.conv_transpose2d(x[None], x[:, :2, :3, None] + 0.5),
    "softmax": lambda x: (x.softmax(-1), x.softmax(1), x.log_softmax(-1), x.log_softmax(1)),
    "logsumexp": over(torch.logsumexp),
    "layer norm": lambda x: (F.layer_norm(x, x.shape[2:]), F.rms_norm(x, x.shape[2:])),
    "group norm": lambda x: (F.group_norm(x, 2), F.group_norm(x, 1, x[0, :, 0], x[0, :, 1])),
    "instance norm": F.instance_norm,
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "scatter mean": lambda x: torch.scatter_reduce(x[0, 0], 0, INDEX, x[0, 1], "mean"),
    "interpolation": lambda x: (
        F.interpolate(x[None], size=(5, 31), mode="bilinear"),
        F.interpolate(x, size=31, mode="linear"),
    ),
    "distances": lambda x: (F.pairwise_distance(x[0], x[1]), F.cosine_similarity(x[0], x[1], -1)),
    "sum with a factor": lambda x: (
        torch.add(x[0, 0, :1], x[0], alpha=3),
        torch.add(x[0, 0, 0], x[0], alpha=0.5),
        torch.sub(x[0, 0, :1], torch.arange(4), alpha=1.5),
        torch.narrow_copy(x, -1, 2, 2),
    ),
    "remainder": lambda x: (torch.remainder(-x, x.flip(0) + 1), -x % 1.5),
    "matrix of distances": lambda x: (torch.cdist(x, x.flip(0)), F.pdist(x[0])),
}


def numbers(dtype: torch.dtype) -> Tensor:
    """Return positive floats of full width, or integers of all sizes that the type holds."""
    generator = torch.Generator().manual_seed(7)
    if dtype.is_floating_point:
        length = 64 if dtype == torch.float64 else 256
        return torch.rand(3, 16, length, generator=generator, dtype=torch.float64).to(dtype)
    if dtype == torch.bool:
        return torch.rand(3, 16, 64, generator=generator) > 0.5
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, (3, 16, 64), generator=generator, dtype=dtype)


def check(functions: dict[str, Function], *calls: Tensor, **options: Any) -> None:
    """Compare the runtimes with a wider type, and with eager's error."""
    for result in run_together(functions, *((call,) for call in calls), **options):
        (x,) = result.args
        eager = pytree.tree_leaves(result.function(x))
        wide = pytree.tree_leaves(result.function(x.double() if x.is_floating_point() else x))
        for found, expected, exact in zip(result.outputs, eager, wide, strict=True):
            assert found.dtype == expected.dtype, result.where
            if found.is_floating_point():
                _check_error(found, expected, exact, result.where)
            else:
                assert torch.equal(found, expected), result.where


def _check_error(found: Tensor, expected: Tensor, exact: Tensor, where: str) -> None:
    assert torch.equal(found.isfinite(), expected.isfinite()), where
    finite = expected.isfinite() & exact.isfinite()
    if finite.any():
        errors = ((one.double() - exact)[finite].abs().max() for one in (found, expected))
        error, eagers = errors
        unit = torch.finfo(found.dtype).eps * exact[finite].abs().max()
        # torch has no wider type than float64, so that eager's own error is unknown there. The
        # kernel of group norm adds the squares of a group one by one.
        units = 16 if found.dtype == torch.float64 or "group norm" in where else 4
        assert error <= 4 * eagers + units * unit, (where, float(error), float(eagers))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_sums_are_as_exact_as_eagers(dtype: torch.dtype) -> None:
    x = numbers(dtype)
    table = {**SUMS, **REALS} if dtype.is_floating_point else SUMS
    functions = computed(table, x)
    missing = 0 if dtype in FLOATS[:2] else 1 if dtype in FLOATS else 2
    assert dtype == torch.bool or len(functions) >= len(table) - missing
    check(functions, x)


# The sum of any of these in float32 is infinite, 0, or has lost the small ones.
# Powers of two, so that those in float64 are exact in any order.
SCALES = (2.0**970, 2.0**-1000, 1.0)


def test_float64_is_not_narrowed() -> None:
    x = torch.ones(3, 16, 64, dtype=torch.float64)
    x[:, :, 0] = 2.0**40
    table = {**SUMS, **REALS}
    names = ("sum", "mean", "running sum", "average pools", "softmax")
    check({name: table[name] for name in names}, *(x * scale for scale in SCALES))
    check({"mm": SUMS["mm"]}, *(x * scale**0.5 for scale in SCALES))
