"""Batched products by what is repeated or transposed, with the numbers of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim, export

from lowerdeck.decompose import decompose
from lowerdeck.emitter import emit
from lowerdeck.runner import load
from lowerdeck_zoo import assert_close, official

pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)


class Products(nn.Module):
    """Two products, as drawn: by what is transposed, and by what is not."""

    def __init__(self, draw: dict[str, Any]) -> None:
        super().__init__()
        self.draw = draw

    def _more(self, x: Tensor) -> Tensor:
        times = self.draw["times"]
        match self.draw["repeats"]:
            case "interleaved":
                return x.repeat_interleave(times, 1)
            case "tiled":
                return x.repeat(1, times, 1, 1)
            case _:
                batch, heads, *matrix = x.shape
                more = x[:, :, None].expand(batch, heads, times, *matrix)
                return more.reshape(batch, heads * times, *matrix)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        if self.draw["scale"] == "before":
            k, v = k * 0.5, v * 2
        match self.draw["transposes"]:
            case "first":
                keys = self._more(k.transpose(-1, -2))
            case "twice":
                keys = self._more(k.transpose(-1, -2)).mT.contiguous().mT
            case _:
                keys = self._more(k).transpose(-1, -2)
        values = self._more(v)
        if self.draw["scale"] == "after":
            keys, values = keys * 0.5, values * 2
        if self.draw["whole"]:
            found = nn.functional.scaled_dot_product_attention(q, keys.mT, values)
        else:
            found = (q @ keys) @ values
        return (found, values.sum()) if self.draw["read"] else found


drawn = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "heads": st.integers(1, 3),
        "times": st.integers(1, 3),
        "rows": st.integers(1, 4),
        "length": st.sampled_from([1, 2, 33, 40]),
        "width": st.sampled_from([1, 3, 32, 35]),
        "repeats": st.sampled_from(["expanded", "interleaved", "tiled"]),
        "transposes": st.sampled_from(["last", "first", "twice"]),
        "scale": st.sampled_from(["", "before", "after"]),
        "whole": st.booleans(),
        "read": st.booleans(),
        "varies": st.booleans(),
        "apart": st.booleans(),
    }
)


@given(drawn)
@settings(max_examples=60, deadline=None)
def test_numbers_are_those_of_eager(draw: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Products(draw)
    batch, length, width = draw["batch"], draw["length"], draw["width"]

    def inputs(rows: int) -> tuple[Tensor, ...]:
        heads = draw["heads"]
        q = torch.randn(batch, heads * draw["times"], rows, width)
        return (
            q,
            torch.randn(batch, heads, length, width),
            torch.randn(batch, heads, length, width),
        )

    rows = Dim("rows", min=1, max=9)
    shapes = ({2: rows}, None, None) if draw["varies"] else None
    program = export(model, inputs(3 if draw["varies"] else draw["rows"]), dynamic_shapes=shapes)
    data = emit(decompose(program) if draw["apart"] else program).to_bytes()
    several = [1, 9, draw["rows"]] if draw["varies"] else [draw["rows"]]
    given_all = [inputs(count) for count in several]
    outcome = official.run(data, [official.Call(one) for one in given_all])
    assert isinstance(outcome, official.Ran), outcome
    ours = load(data)
    for one, found in zip(given_all, outcome.outputs, strict=True):
        wanted = model(*one)
        wanted = list(wanted) if isinstance(wanted, tuple) else [wanted]
        assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        again = ours.run("forward", *one)
        again = list(again) if isinstance(again, (tuple, list)) else [again]
        assert_close(again, wanted, atol=1e-4, rtol=1e-4)
