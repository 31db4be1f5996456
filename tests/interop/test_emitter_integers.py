"""Integers are computed as in eager: beyond 2^53, where a type ends, and where it wraps around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from lowerdeck_zoo import assert_close
from tests.interop.functions_together import computed, run_together

DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# The first integer that float64 does not know.
BIG = 2**53 + 1
Function = Callable[[Tensor], Any]
Pair = Callable[[Tensor, Tensor], Tensor]


def edges(dtype: torch.dtype) -> Tensor:
    """Return the least and largest of a type, and what lies around the ends of others."""
    known = torch.iinfo(dtype)
    around = (2**31, 2**53, 46341, 65536, 94906267, 3000000, 2**24 + 1, 2**62 + 1, 3037000500)
    small = (0, 1, 2, 3, 7, 10)
    found = {sign * (n + step) for n in (*around, *small) for step in (0, 1) for sign in (1, -1)}
    found |= {known.min, known.min + 1, known.max, known.max - 1}
    held = sorted(n for n in found if known.min <= n <= known.max)
    return torch.tensor(held[-(len(held) // 4 * 4) :], dtype=dtype)


def divisors(values: Tensor) -> Tensor:
    """Return the values with nothing that cannot divide the least one."""
    turned = values.flip(0)
    return torch.where((turned == 0) | (turned == -1), torch.full_like(turned, 5), turned)


def pairs(function: Pair) -> Function:
    return lambda k: function(k.unsqueeze(1), divisors(k))


def square(k: Tensor) -> Tensor:
    return k[-4:].view(2, 2)


def held(number: int, k: Tensor) -> int:
    """Return the number of the type of ``k`` that is nearest to ``number``."""
    return max(min(number, torch.iinfo(k.dtype).max), torch.iinfo(k.dtype).min)


ONES = torch.tensor([1, 1])
TWO: dict[str, Pair] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "remainder")},
    **{name: getattr(torch, name) for name in ("floor_divide", "true_divide", "maximum")},
    **{name: getattr(torch, name) for name in ("minimum", "eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(torch, f"bitwise_{name}") for name in ("and", "or", "xor")},
    **{name: getattr(torch, name) for name in ("logical_and", "logical_or", "logical_xor")},
    "div, floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "add, alpha": lambda a, b: torch.add(a, b, alpha=3),
    "sub, alpha": lambda a, b: torch.sub(a, b, alpha=3),
    "where": lambda a, b: torch.where(a > b, a, b),
    "shift": lambda a, b: (a << (b & 7)) + (a >> (b & 7)),
}
ONE = (
    "abs",
    "neg",
    "sign",
    "sgn",
    "bitwise_not",
    "logical_not",
    "relu",
    "sum",
    "prod",
    "max",
    "min",
    "amax",
    "amin",
    "argmax",
)
ONE += ("argmin", "aminmax", "diff", "nonzero", "count_nonzero", "any", "all")
RULES: dict[str, Function] = {
    **{name: getattr(torch, name) for name in ONE},
    **{name: pairs(function) for name, function in TWO.items()},
    **{f"by {n}": lambda k, n=n: (k % n, k // n) for n in (10, 2)},
    **{
        f"{name} {n}, held": lambda k, n=n, name=name: getattr(torch, name)(k, held(n, k))
        for n in (BIG, -BIG, 2**63 - 1)
        for name in ("remainder", "floor_divide", "add", "sub", "mul", "eq", "lt", "ge")
    },
    "a number's remainder": lambda k: (100 % divisors(k), 100 // divisors(k)),
    "a number minus": lambda k: torch.rsub(k, 7, alpha=3),
    "clamp": lambda k: k.clamp(held(-BIG, k), held(BIG, k)),
    "clamp by tensors": lambda k: torch.clamp(k, k[2], k[-2]),
    "masked_fill": lambda k: k.masked_fill(k > 2, held(BIG, k)),
    "full": lambda k: k + torch.full_like(k, held(BIG, k)),
    "pad": lambda k: nn.functional.pad(k, (1, 1), value=held(BIG, k)),
    "sum over a dimension": lambda k: k.view(2, -1).sum(0),
    "sum over the last, kept": lambda k: k.view(2, -1).sum(-1, keepdim=True),
    "sum over two": lambda k: k.view(2, 2, -1).sum((0, 2)),
    "running": lambda k: (k.cumsum(0), k[-5:].cumprod(0), k.cummax(0).values),
    "prod over a dimension": lambda k: k.view(2, -1).prod(0),
    "sort": lambda k: (k.flip(0).sort().values, k.topk(3).values),
    "gather": lambda k: k.gather(0, torch.tensor([1, 0])),
    "scatter_add": lambda k: k.scatter_add(0, ONES, k[-2:]),
    "index_add": lambda k: k.index_add(0, ONES, k[-2:]),
    "index_put": lambda k: k.index_put((ONES,), k[-2:], accumulate=True),
    "scatter_reduce": lambda k: k.scatter_reduce(0, ONES, k[-2:], "amin"),
    "mm": lambda k: (square(k) @ square(k), square(k) @ k[-2:], torch.dot(k, k)),
    "addmm": lambda k: torch.addmm(square(k), square(k), square(k), beta=3, alpha=5),
    "linear": lambda k: nn.functional.linear(square(k), square(k)),
    "addcmul": lambda k: torch.addcmul(k, k, k, value=3),
    "to other types": lambda k: [k.to(dtype) for dtype in (*DTYPES, torch.float64, torch.bool)],
    "max_pool2d": lambda k: nn.functional.max_pool2d(k[-4:].view(1, 1, 2, 2), 2),
}


def check(functions: dict[str, Function], *calls: Tensor, **options: Any) -> None:
    for result in run_together(functions, *((call,) for call in calls), **options):
        expected = pytree.tree_leaves(result.function(*result.args))
        for found, other in zip(result.outputs, expected, strict=True):
            rtol = 1e-6 if other.is_floating_point() else 0
            torch.testing.assert_close(
                found, other, atol=0, rtol=rtol, msg=lambda text, r=result: f"{r.where}: {text}"
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_are_those_of_eager(dtype: torch.dtype) -> None:
    functions = computed(RULES, edges(dtype))
    assert len(functions) >= len(RULES) - 12
    check(functions, edges(dtype))


def test_sums_over_one_dimension_of_a_size_that_varies() -> None:
    functions = {
        "sums": lambda k: (k.sum(0), k.sum(1)),
        "made": lambda k: torch.full(k.shape[:1], BIG),
    }
    calls = [torch.full((count, 4), BIG) for count in (3, 0, 1, 5, 8)]
    check(functions, *calls, dynamic_shapes=(({0: Dim("rows", min=0, max=8)},),))


def test_masks_and_numbers_are_added_as_in_eager() -> None:
    added = lambda k, n: ((k > 0) + n, n + (k > 0), (k > 0) * n, torch.rsub((k > 0).long(), n))  # noqa: E731
    numbers = (1, -2, 1.5)
    mask = torch.tensor([True, False, True])
    check({f"{n}": lambda k, n=n: added(k, n) for n in numbers}, mask.long() - 1)
    check({f"{n}": lambda k, n=n: k + n for n in numbers}, mask)


SIZES: tuple[Any, ...] = ({"size": (3, 3)}, {"size": (7, 5)}, {"size": (12, 30)})


def test_images_of_bytes_shrink_as_in_eager() -> None:
    torch.manual_seed(0)
    image = torch.randint(0, 256, (2, 3, 10, 20), dtype=torch.uint8)
    functions = {
        f"{asked} {smooth}": lambda x, asked=asked, smooth=smooth: nn.functional.interpolate(
            x, **asked, mode="bilinear", antialias=smooth
        )
        for asked in (*SIZES, {"scale_factor": 0.5}, {"scale_factor": (0.35, 0.93)})
        for smooth in (True, False)
    }
    for result in run_together(functions, (image,)):
        apart = result.outputs[0].int() - result.function(image).int()
        # torch weighs bytes with 15 bits; the kernel without antialiasing truncates.
        assert int(apart.abs().max()) <= 1, result.where
        is_smooth = "True" in result.where
        assert not is_smooth or float((apart != 0).float().mean()) < 0.1, result.where


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_products_of_bytes_are_exact(dtype: torch.dtype) -> None:
    weight = torch.randint(-128, 128, (19, 3), dtype=torch.int8)
    ends = torch.iinfo(dtype)
    rows = torch.randint(ends.min, ends.max + 1, (5, 19), dtype=dtype)
    rows[0], rows[1] = ends.min, ends.max
    for result in run_together({"product": lambda x: torch._int_mm(x, weight)}, (rows,)):
        assert_close(result.outputs[0].long(), rows.long() @ weight.long(), atol=0, rtol=0)
