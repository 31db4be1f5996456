"""Layers of small integers, of which rows or groups are zero, tiny or huge, in both runtimes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from lowerdeck.runner import load
from lowerdeck_zoo import official
from tests.interop.runs import file_of, run

torchao = pytest.importorskip("torchao.quantization")
granularity = pytest.importorskip("torchao.quantization.granularity")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]
KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a row": lambda weight: weight[3].zero_(),
    "a group of all": lambda weight: weight[:, 32:64].zero_(),
    "a group of one": lambda weight: weight[2, 32:64].zero_(),
    "all": lambda weight: weight.zero_(),
    "tiny": lambda weight: weight[2].mul_(1e-30),
    "a tiny group": lambda weight: weight[2, :32].mul_(1e-38),
    "huge": lambda weight: weight[2].mul_(1e30),
    "negative zero": lambda weight: weight[3].fill_(-0.0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_what_has_no_range_is_computed_as_in_eager(bits: int, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(128, 16)
    with torch.no_grad():
        KINDS[kind](layer.weight)
    model = nn.Sequential(layer, nn.ReLU()).eval()
    config = torchao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4 if bits == 4 else torch.int8,
        weight_granularity=(granularity.PerGroup(32) if bits == 4 else granularity.PerAxis(0)),
    )
    torchao.quantize_(model, config)
    rows = torch.randn(5, 128)
    rows[2] = 0
    program = export(model, (rows,), dynamic_shapes=({0: Dim("rows", max=9)},))
    file, calls = file_of(program), [rows[:0], rows, rows[2:3]]
    outputs = run(file, [(one,) for one in calls], tmp_path)
    for (found,), given in zip(outputs, calls, strict=True):
        # torchao itself cannot quantise no rows.
        wanted = model(given) if len(given) else torch.zeros(0, 16)
        assert found.shape == wanted.shape
        # A tie of a row's rounding is one step of 255 off, and so is one input of 128.
        bound = 0.02 * float(wanted.abs().max()) if wanted.numel() else 0.0
        assert not found.isnan().any()
        assert not wanted.numel() or float((found - wanted).abs().max()) <= bound + 1e-6
        ours = load(file).run("forward", given)
        torch.testing.assert_close(ours, found, rtol=1e-3, atol=1e-4)
