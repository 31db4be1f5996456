"""Views that share memory begin at the right byte: slices, selections and parts of all kinds."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.emitter import emit
from lowerdeck_zoo import assert_close, official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

BOUNDS = (None, 0, 1, 2, 3, -1, -2, -3, 9, -9)
SHAPES = ((4,), (4, 3), (1, 4, 3), (1, 1, 4), (2, 4), (4, 1, 3))


def views(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for dim in range(x.dim()):
        size = x.shape[dim]
        for start, stop in itertools.product(BOUNDS, BOUNDS):
            index = (slice(None),) * dim + (slice(start, stop),)
            yield x[index]
        yield x[(slice(None),) * dim + (slice(1, None, 2),)]
        for index in range(-size, size):
            yield x.select(dim, index)
            yield x.select(dim - x.dim(), index)
        if size >= 3:
            yield from x.split([1, size - 1], dim)
            yield from x.split([2, size - 2], dim - x.dim())
            yield from x.split(3, dim)
        yield from x.unbind(dim)
        yield from x.chunk(2, dim)
    for order in itertools.permutations(range(x.dim())):
        yield x.permute(order)
        yield x.permute([dim - x.dim() for dim in order])
    yield x.unsqueeze(0).unsqueeze(-1)
    yield x.reshape(-1)[1:].view(-1)
    yield x.flatten()[2:][-2:]


class AllViews(nn.Module):
    """Adds each view to itself, so that it is read, and returns some of them as they are."""

    def forward(self, x: torch.Tensor) -> Any:
        y = x * 2
        found = [view for view in views(y) if view.numel()]
        return [view + view for view in found], found[::7]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_view_reads_the_bytes_that_eager_reads(shape: tuple[int, ...], tmp_path: Path) -> None:
    x = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        emitted = emit(torch.export.export(AllViews(), (x,)))
    emitted.save(tmp_path / "model.pte")
    expected = [tensor for group in AllViews()(x) for tensor in group]
    for source in (emitted.to_bytes(), tmp_path / "model.pte"):
        outcome = official.run(source, [official.Call((x,))])
        assert isinstance(outcome, official.Ran), outcome
        assert_close(outcome.outputs[0], expected, atol=0, rtol=0)
