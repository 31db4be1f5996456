"""Norms through XNNPACK are as exact as eager's: of constant rows, and far from zero.

The official runtime computes, float64 judges. Norms that XNNPACK does not take run in the portable
kernels of the same file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from lowerdeck_zoo import official
from tests.interop.runs import check, file_of, run

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]
WIDTHS = (1, 2, 3, 5, 8, 17, 32, 64, 65, 100, 128, 192, 300, 512, 768, 1000, 1021, 1024, 2048)


def by_hand(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)


def by_hand_without_keepdim(x: Tensor) -> Tensor:
    centred = x - x.mean((1, 2)).view(-1, 1, 1)
    return centred * torch.rsqrt(centred.square().mean((1, 2))[:, None, None] + 1e-5)


def by_hand_of_images(x: Tensor) -> Tensor:
    images = x.unsqueeze(2)
    centred = images - images.mean((2, 3), keepdim=True)
    return centred * torch.rsqrt((centred**2).mean((2, 3), keepdim=True) + 1e-5)


def with_parameters(x: Tensor) -> Tensor:
    scale = torch.linspace(2, 0.5, x.shape[-1], dtype=x.dtype)
    return functional.layer_norm(x, x.shape[-1:], scale, scale - 1)


def of_channels_last(x: Tensor) -> Tensor:
    images = x.unsqueeze(2).contiguous(memory_format=torch.channels_last)
    return functional.group_norm(functional.relu(images) - functional.relu(-images), 1)


def of_batch(x: Tensor) -> Tensor:
    return functional.batch_norm(x, None, None, channels(x), channels(x), training=True)


def updating(x: Tensor) -> Tensor:
    legit = torch.ops.aten._native_batch_norm_legit_functional
    return legit(x, *[channels(x)] * 4, True, 0.1, 1e-5)[0]


def channels(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 2, x.shape[1], dtype=x.dtype)


def narrow(x: Tensor, rows: int) -> Tensor:
    """Return a tensor of which some rows have about as many numbers as one of all."""
    return x[..., : -(-x.shape[-1] // rows)]


NORMS: dict[str, Callable[[Tensor], Any]] = {
    "layer": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "layer of two": lambda x: functional.layer_norm(narrow(x, 4), narrow(x, 4).shape[-2:]),
    "layer, with parameters": with_parameters,
    "group": lambda x: functional.group_norm(narrow(x, 2), 2, channels(x), channels(x)),
    "group of one": lambda x: functional.group_norm(x, 4),
    "one group, channels last": lambda x: of_channels_last(narrow(x, 4)),
    "instance": lambda x: functional.instance_norm(x) if x.shape[-1] > 1 else x,
    "rms": lambda x: functional.rms_norm(x, x.shape[-1:]),
    "rms with eps": lambda x: functional.rms_norm(x, x.shape[-1:], None, 1e-5),
    "batch": lambda x: of_batch(narrow(x, 3)),
    "batch, with running statistics": lambda x: updating(narrow(x, 3)),
    "batch of one": lambda x: of_batch(x[:1, :, :, None]) if x.shape[-1] > 1 else x,
    "variance": lambda x: x.var(-1),
    "variance of all": lambda x: narrow(x, 12).var(correction=0),
    "variance, along the middle": lambda x: x.mT.var(1),
    "variance of images": lambda x: x.unsqueeze(2).var((2, 3), keepdim=True),
    "deviation": lambda x: narrow(x, 4).std((1, 2)),
    "variance and mean": lambda x: torch.var_mean(x, -1, correction=0, keepdim=True),
    "deviation and mean": lambda x: torch.std_mean(narrow(x, 3), (0, 2)),
    "mean": lambda x: x.mean(-1),
    "mean of several dimensions": lambda x: narrow(x, 3).mean((0, 2)),
    "sum": lambda x: narrow(x, 4).sum(-1),
    "by hand": by_hand,
    "by hand, over two dimensions": lambda x: by_hand_without_keepdim(narrow(x, 4)),
    "by hand, of images": by_hand_of_images,
}
WITH_ROOTS = {"deviation", "deviation and mean", "by hand", "by hand, over two dimensions"}
"""Norms with a square root; XNNPACK's is NaN for infinity."""
IN_DOUBLE = {"batch", "batch, with running statistics"}
"""Norms whose squares eager adds up in float64, where they do not overflow."""


class Each(nn.Module):
    """A function of each of several tensors."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        return pytree.tree_leaves([self.function(one) for one in tensors])


def inputs() -> Iterator[tuple[Tensor, ...]]:
    """Yield a tensor of each width: constant, with a large mean, and mixed."""
    generator = torch.Generator().manual_seed(0)

    def noise(width: int) -> Tensor:
        return torch.randn(3, 4, width, generator=generator)

    for constant in (-100.0, 0.1, 1 / 3, 7.3e3):
        yield tuple(torch.full((3, 4, width), constant) for width in WIDTHS)
    for mean in (1e2, 1e3, 1e4):
        yield tuple(noise(width) + mean for width in WIDTHS)
        yield tuple(7.3 * (1 + noise(width) / mean) for width in WIDTHS)
    for far in (0, -1):  # one number far from the others
        outliers = [noise(width) + 3 for width in WIDTHS]
        for one in outliers:
            one[..., far] = 1e3
        yield tuple(outliers)
    rows = torch.tensor([[-100.0, 0.1, 0, 7.3], [0, 1e2, 1e3, 1e4], [0, 3e-3, -5, 0.0]])
    scale = torch.tensor([[0.0, 0, 1, 0], [1, 1, 1, 1], [1, 0, 1e-3, 0]])
    yield tuple(noise(width) * scale[..., None] + rows[..., None] for width in WIDTHS)
    yield tuple(noise(width) + 3 for width in WIDTHS)
    for infinity in (math.inf, -math.inf):  # in one row
        rows_of_noise = [noise(width) for width in WIDTHS]
        for one in rows_of_noise:
            # Not at the end: var_mean's mean is infinite there, NaN elsewhere.
            one[1, 2, : one.shape[-1] // 2][-1:] = infinity
        yield tuple(rows_of_noise)


def largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def last_place(number: float, dtype: torch.dtype) -> float:
    """Return the unit in the last place of a number."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(number)) if number else 0.0


def assert_as_exact(
    model: nn.Module, call: tuple[Tensor, ...], outputs: list[Tensor], *, fewer_nans: bool = False
) -> None:
    """Assert that results have eager's infinities, and beside them at most 4 times its error."""
    eager, exact = model(*call), model(*(one.double() for one in call))
    for number, (result, plain, right) in enumerate(zip(outputs, eager, exact, strict=True)):
        where = f"output {number} for a tensor of {call[0].flatten()[:2]}"
        if fewer_nans:
            assert not (result.isnan() & ~plain.isnan()).any(), where
        else:
            assert torch.equal(result.isnan(), plain.isnan()), where
        assert torch.equal(result[plain.isinf()], plain[plain.isinf()]), where
        finite = plain.isfinite()
        error, own = (largest(one[finite].double() - right[finite]) for one in (result, plain))
        assert error <= 4 * own + 4 * last_place(largest(right[finite]), plain.dtype), where


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_norm_is_as_exact_as_eager(
    name: str, decomposed: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    calls = [tuple(one.to(dtype) for one in call) for call in inputs()]
    model = Each(NORMS[name])
    file = file_of(model, calls[0], decomposed=decomposed)
    for call, outputs in zip(calls, run(file, calls, tmp_path), strict=True):
        assert_as_exact(model, call, outputs)


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("name", sorted(NORMS.keys() - WITH_ROOTS - IN_DOUBLE))
def test_squares_that_overflow(name: str, decomposed: bool, tmp_path: Path) -> None:
    """Squares of 1e20 are infinite in float32, so that most norms are 0.

    Eager has NaN for some layer norms of these rows, depending on their width.
    """
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(3, 4, width, generator=generator) for width in WIDTHS]
    calls = [
        tuple((one + one.sign()) * 1e20 for one in noise),
        tuple(torch.full_like(one, 1e20) for one in noise),
    ]
    model = Each(NORMS[name])
    file = file_of(model, calls[0], decomposed=decomposed)
    for call, outputs in zip(calls, run(file, calls, tmp_path), strict=True):
        assert_as_exact(model, call, outputs, fewer_nans=True)


@pytest.mark.parametrize("norm", [functional.layer_norm, functional.rms_norm])
@pytest.mark.parametrize("free", [(0,), (0, 1)])
def test_rows_of_varying_number(norm: Callable[..., Tensor], free: tuple[int, ...]) -> None:
    """A mean is taken otherwise where two sizes vary, and there may be no rows."""
    widths = (32, 300, 768, 1021, 2048)
    sizes = [tuple(size if axis in free else 4 for axis in (0, 1)) for size in (3, 7, 0, 5)]
    calls = [tuple(torch.randn(*size, width) + 100 for width in widths) for size in sizes]
    dims = {axis: torch.export.Dim(f"size{axis}", max=7) for axis in free}
    shapes = {"tensors": tuple(dims for _ in widths)}
    model = Each(lambda x: norm(x, x.shape[-1:]))
    for call, outputs in zip(
        calls, run(file_of(model, calls[0], dynamic_shapes=shapes), calls), strict=True
    ):
        assert_as_exact(model, call, outputs)


def test_pools_of_halves_do_not_overflow() -> None:
    """A sum of 1,000 numbers of 100 is infinite in float16; their mean is not."""

    def pools(x: Tensor) -> list[Tensor]:
        flat = functional.avg_pool1d(x.flatten(2), 1000)
        whole = functional.avg_pool2d(x, (25, 40))
        return [flat, whole, functional.adaptive_avg_pool2d(x, (1, 2))]

    check(Each(pools), (torch.full((1, 2, 25, 40), 100.0, dtype=torch.float16),), tolerance=1e-3)
