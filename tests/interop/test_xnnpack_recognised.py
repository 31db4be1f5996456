"""Decomposed programs in the official runtime: operators in their pieces, and what looks alike."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import official

sys.path.insert(0, str(Path(__file__).parents[2] / "packages/xnnpack/tests"))
from recognised_cases import NEAR, WHOLE, WRITTEN_OUT, model_of

pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)
Inputs = tuple[torch.Tensor, ...]
ALL = {
    **WHOLE,
    **{f"written_{name}": tuple(case[1:]) for name, case in WRITTEN_OUT.items()},
    **{name: tuple(case[1:]) for name, case in NEAR.items()},
}


def agrees(model: torch.nn.Module, inputs: Inputs, path: Path) -> None:
    """Assert that the decomposed model gives eager's numbers, read from a path."""
    program = torch.export.export(model, inputs).run_decompositions()
    emit(to_backend(program, XnnpackPartitioner())).save(path)
    outcome = official.run(path, [official.Call(inputs), official.Call(inputs)])
    assert isinstance(outcome, official.Ran), outcome
    with torch.no_grad():
        expected = model(*inputs)
    wanted = expected if isinstance(expected, tuple) else (expected,)
    for outputs in outcome.outputs:
        for found, right in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(found, right, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_decomposed_programs_equal_eager(case: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, inputs = model_of(*case)
    agrees(model, inputs, tmp_path / "model.pte")


SIZE = st.integers(1, 5)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_attention_of_any_sizes(tmp_path: Path, data: st.DataObject) -> None:
    batch, groups, many, rows, columns, width, out = (data.draw(SIZE) for _ in range(7))
    masked = data.draw(st.sampled_from(["", "causal", "truths", "numbers"]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    mask: torch.Tensor | None = None
    if masked == "truths":
        mask = torch.rand(data.draw(st.sampled_from([1, batch])), 1, rows, columns) > 0.4
    elif masked == "numbers":
        mask = torch.randn(rows, columns)
    # Eager's own causal mask makes NaN where the scale is negative.
    scale = data.draw(st.sampled_from([None, 0.3] if masked == "causal" else [None, 0.3, -1.0]))

    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(
                *(q, k, v, mask),
                is_causal=masked == "causal",
                scale=scale,
                enable_gqa=many > 1,
            )

    heads = groups * many
    shapes = [(batch, heads, rows, width), (batch, groups, columns, width)]
    inputs = tuple(torch.randn(one) for one in (*shapes, (batch, groups, columns, out)))
    agrees(Attention(), inputs, tmp_path / "model.pte")


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_layers_and_products_of_any_sizes(tmp_path: Path, data: st.DataObject) -> None:
    batch = data.draw(st.lists(SIZE, min_size=1, max_size=3))
    rows, inner, columns = (data.draw(SIZE) for _ in range(3))
    kept = [data.draw(st.sampled_from([1, size])) for size in batch]
    torch.manual_seed(data.draw(st.integers(0, 99)))
    layer = torch.nn.Linear(inner, columns, bias=data.draw(st.booleans()))
    weight = torch.randn(columns)

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            made = self.layer(x)
            return made, x @ y, F.rms_norm(made, [columns], weight, 1e-4), self.layer(x.mT.mT)

    inputs = (torch.randn(*batch, rows, inner), torch.randn(*kept, inner, columns))
    agrees(Layers().eval(), inputs, tmp_path / "model.pte")
