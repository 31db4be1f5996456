"""Integers are computed as in eager: beyond 2^53, where a type ends, and where it wraps around."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lowerdeck.emitter import emit
from lowerdeck_zoo import Of, assert_close, official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

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


def held(number: int) -> Callable[[Tensor], int]:
    """Return a number as each type holds it."""
    return lambda k: max(min(number, torch.iinfo(k.dtype).max), torch.iinfo(k.dtype).min)


TWO: dict[str, Pair] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "fmod", "remainder")},
    **{name: getattr(torch, name) for name in ("floor_divide", "true_divide", "maximum")},
    **{name: getattr(torch, name) for name in ("minimum", "eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(torch, f"bitwise_{name}") for name in ("and", "or", "xor")},
    **{name: getattr(torch, name) for name in ("logical_and", "logical_or", "logical_xor")},
    "div, trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "div, floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "add, alpha": lambda a, b: torch.add(a, b, alpha=3),
    "sub, alpha": lambda a, b: torch.sub(a, b, alpha=3),
    "where": lambda a, b: torch.where(a > b, a, b),
    "shift": lambda a, b: (a << (b & 7)) + (a >> (b & 7)),
}
ONE = ("abs", "neg", "sign", "sgn", "bitwise_not", "logical_not", "relu", "floor", "ceil")
ONE += ("round", "trunc", "square", "sum", "prod", "max", "min", "amax", "amin", "argmax")
ONE += ("argmin", "aminmax", "median", "diff", "nonzero", "count_nonzero", "any", "all")
RULES: dict[str, Function] = {
    **{name: getattr(torch, name) for name in ONE},
    **{name: pairs(function) for name, function in TWO.items()},
    **{f"** {n}": lambda k, n=n: k**n for n in (0, 1, 2, 3, 4, 5, 7, 8, 63)},
    **{f"fmod {n}": lambda k, n=n: torch.fmod(k, n) for n in (10, -10, 2)},
    **{f"remainder {n}": lambda k, n=n: k % n for n in (10, -10, 2)},
    **{f"// {n}": lambda k, n=n: k // n for n in (10, -10, 2)},
    **{
        f"div {n}, trunc": lambda k, n=n: torch.div(k, n, rounding_mode="trunc")
        for n in (10, -10, 2)
    },
    **{
        f"{name} {n}": lambda k, n=n, name=name: getattr(torch, name)(k, held(n)(k))
        for n in (BIG, -BIG, 2**63 - 1)
        for name in ("fmod", "remainder", "floor_divide", "add", "sub", "mul", "eq", "lt", "ge")
    },
    "fmod by a negative one": lambda k: torch.fmod(k[2:], -1),
    "a number's remainder": lambda k: 100 % divisors(k),
    "a number divided": lambda k: 100 // divisors(k),
    "a number minus": lambda k: torch.rsub(k, 7, alpha=3),
    "clamp": lambda k: k.clamp(held(-BIG)(k), held(BIG)(k)),
    "clamp by tensors": lambda k: torch.clamp(k, k[2], k[-2]),
    "masked_fill": lambda k: k.masked_fill(k > 2, held(BIG)(k)),
    "full": lambda k: k + torch.full_like(k, held(BIG)(k)),
    "arange": lambda k: torch.arange(BIG, BIG + 5) + k[:1],
    "pad": lambda k: nn.functional.pad(k, (1, 1), value=held(BIG)(k)),
    "sum over a dimension": lambda k: k.view(2, -1).sum(0),
    "sum over the last, kept": lambda k: k.view(2, -1).sum(-1, keepdim=True),
    "sum over two": lambda k: k.view(2, 2, -1).sum((0, 2)),
    "sum in the same type": lambda k: k.view(2, -1).sum(1, dtype=k.dtype),
    "cumsum": lambda k: k.cumsum(0),
    "cumprod": lambda k: k[-5:].cumprod(0),
    "prod over a dimension": lambda k: k.view(2, -1).prod(0),
    "cummax": lambda k: k.cummax(0).values,
    "sort": lambda k: k.flip(0).sort().values,
    "topk": lambda k: k.topk(3).values,
    "gather": lambda k: k.gather(0, torch.tensor([1, 0])),
    "scatter_add": lambda k: k.scatter_add(0, torch.tensor([1, 1]), k[-2:]),
    "index_add": lambda k: k.index_add(0, torch.tensor([1, 1]), k[-2:]),
    "index_put": lambda k: k.index_put((torch.tensor([1, 1]),), k[-2:], accumulate=True),
    "scatter_reduce": lambda k: k.scatter_reduce(0, torch.tensor([1, 1]), k[-2:], "prod"),
    "mm": lambda k: square(k) @ square(k),
    "mv": lambda k: square(k) @ k[-2:],
    "dot": lambda k: torch.dot(k, k),
    "addmm": lambda k: torch.addmm(square(k), square(k), square(k), beta=3, alpha=5),
    "addmv": lambda k: torch.addmv(k[-2:], square(k), k[-2:]),
    "linear": lambda k: nn.functional.linear(square(k), square(k)),
    "addcmul": lambda k: torch.addcmul(k, k, k, value=3),
    "to other types": lambda k: [k.to(dtype) for dtype in (*DTYPES, torch.float64, torch.bool)],
    "max_pool2d": lambda k: nn.functional.max_pool2d(k[-4:].view(1, 1, 2, 2), 2),
}


def agrees(function: Function, values: Tensor, folder: Path | None = None) -> None:
    wanted = pytree.tree_leaves(function(values.clone()))
    content = emit(torch.export.export(Of(function), (values,))).to_bytes()
    program: bytes | Path = content
    if folder is not None:
        program = folder / "integers.pte"
        program.write_bytes(content)
    outcome = official.run(program, [official.Call((values,))])
    assert isinstance(outcome, official.Ran), outcome
    for found, want in zip(outcome.outputs[0], wanted, strict=True):
        tolerance = 1e-6 if want.is_floating_point() else 0
        torch.testing.assert_close(found, want, atol=0, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_integers_are_those_of_eager(name: str, dtype: torch.dtype) -> None:
    values = edges(dtype)
    try:
        RULES[name](values.clone())
    except RuntimeError:
        pytest.skip("torch computes no such thing in this type")
    agrees(RULES[name], values)


@pytest.mark.parametrize("name", ["** 3", "fmod", "div, trunc", "sum over a dimension", "floor"])
def test_integers_are_those_of_eager_from_a_path(name: str, tmp_path: Path) -> None:
    agrees(RULES[name], edges(torch.int64), tmp_path)


@pytest.mark.parametrize("number", [-10, 300, BIG])
def test_numbers_that_a_type_does_not_hold_wrap_around_as_in_eager(number: int) -> None:
    for dtype in DTYPES:
        k = edges(dtype)
        agrees(lambda k: (torch.fmod(k, number), torch.floor_divide(k, number)), k)
        agrees(lambda k: torch.div(k, number, rounding_mode="trunc"), k)


def test_sums_over_one_dimension_of_a_size_that_varies() -> None:
    rows = torch.export.Dim("rows", min=0, max=8)

    class Sums(nn.Module):
        def forward(self, k: Tensor) -> Any:
            count = k.shape[0]
            return k.sum(0), k.sum(1), torch.arange(BIG, BIG + count), torch.full((count,), BIG)

    given = torch.full((3, 4), BIG)
    program = emit(torch.export.export(Sums(), (given,), dynamic_shapes=({0: rows},))).to_bytes()
    for count in (0, 1, 5, 8):
        values = torch.full((count, 4), BIG)
        outcome = official.run(program, [official.Call((values,))])
        assert isinstance(outcome, official.Ran), outcome
        assert_close(outcome.outputs[0], Sums()(values), atol=0, rtol=0)


@pytest.mark.parametrize("number", [1, -2, 1.5])
def test_masks_and_numbers_are_added_as_in_eager(number: float) -> None:
    mask = torch.tensor([True, False, True])
    for function in (
        lambda k: (k > 0) + number,
        lambda k: number + (k > 0),
        lambda k: torch.rsub((k > 0).long(), number),
        lambda k: (k > 0) * number,
    ):
        agrees(function, mask.long() - 1)
    agrees(lambda k: k + number, mask)


def limited(low: int | None, high: int | None) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Return ways to limit a tensor by numbers that its type may not hold."""
    tensors = [None if one is None else torch.tensor(one) for one in (low, high)]
    each = [None if one is None else torch.tensor([one, 1, 2, 3]) for one in (low, high)]
    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "numbers": lambda x: x.clamp(low, high),
        "tensors": lambda x: torch.clamp(x, *tensors),
        "each": lambda x: torch.clamp(x, *each),
    }
    if low is not None:
        ways["maximum"] = lambda x: torch.maximum(x, torch.tensor(low))
        ways["maximum, turned"] = lambda x: torch.maximum(torch.tensor([low, 2, 3, 4]), x)
    if high is not None:
        ways["minimum"] = lambda x: torch.minimum(x, torch.tensor(high))
    return ways


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_limits_outside_of_a_type_wrap_around(dtype: torch.dtype) -> None:
    given = torch.tensor([0, 1, 5, 100], dtype=dtype)
    compared = 0
    for low, high in ((-1, 1), (-1, None), (None, -1), (-255, -3), (300, 70000), (None, 300)):
        for way, function in limited(low, high).items():
            model = Of(function)
            try:
                wanted = model(given)
            except RuntimeError:
                continue  # numbers that torch refuses for the type
            outcome = official.run(
                emit(torch.export.export(model, (given,))).to_bytes(), [official.Call((given,))]
            )
            assert isinstance(outcome, official.Ran), (way, low, high, outcome)
            assert torch.equal(outcome.outputs[0][0], wanted), (way, low, high)
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize("factor", [-3, -1, 2, 255])
def test_bytes_are_added_with_factors_of_either_sign(factor: int) -> None:
    values = torch.tensor([0, 1, 5, 200], dtype=torch.uint8)
    for function in (
        lambda k: torch.add(k, k + 1, alpha=factor),
        lambda k: torch.sub(k, k + 1, alpha=factor),
        lambda k: torch.rsub(k, k + 1, alpha=factor),
    ):
        agrees(function, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "end"), [(4.3, 0), (4.9, 50), (0, 9.99), (3, 99)])
def test_evenly_spaced_integers_begin_and_end_at_integers(
    dtype: torch.dtype, start: float, end: float
) -> None:
    # Few of them: eager multiplies and adds in one rounding, and may cut one more number down.
    steps = int(abs(int(end) - int(start))) + 1
    agrees(lambda k: torch.linspace(start, end, steps, dtype=dtype) + k, torch.zeros(1).to(dtype))


@pytest.mark.parametrize(
    "asked",
    [{"size": (3, 3)}, {"size": (7, 5)}, {"size": (12, 30)}, {"scale_factor": 0.5}],
    ids=str,
)
def test_images_of_bytes_shrink_as_in_eager(asked: dict[str, Any]) -> None:
    torch.manual_seed(0)
    image = torch.randint(0, 256, (2, 3, 10, 20), dtype=torch.uint8)
    for antialias in (True, False):
        resize = partial(nn.functional.interpolate, **asked, mode="bilinear", antialias=antialias)
        model = Of(resize)
        program = emit(torch.export.export(model, (image,))).to_bytes()
        outcome = official.run(program, [official.Call((image,))])
        assert isinstance(outcome, official.Ran), outcome
        apart = outcome.outputs[0][0].int() - model(image).int()
        # torch weighs bytes with 15 bits.
        assert int(apart.abs().max()) <= 1
        assert float((apart != 0).float().mean()) < 0.1


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randint(-128, 128, (19, 3), dtype=torch.int8)
        self.register_buffer("weight", weight)

    def forward(self, rows: Tensor) -> Tensor:
        return torch._int_mm(rows, self.weight)  # type: ignore[arg-type]  # a buffer


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_products_of_bytes_are_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    ends, path = torch.iinfo(dtype), tmp_path / "model.pte"
    rows = torch.randint(ends.min, ends.max + 1, (5, 19), dtype=dtype)
    rows[0], rows[1] = ends.min, ends.max
    model = Product()
    path.write_bytes(emit(torch.export.export(model, (rows,))).to_bytes())
    outcome = official.run(path, [official.Call((rows,))])
    assert isinstance(outcome, official.Ran), outcome
    assert torch.equal(outcome.outputs[0][0].long(), rows.long() @ model.weight.long())  # type: ignore[operator]
