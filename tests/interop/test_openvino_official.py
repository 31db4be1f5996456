"""OpenVINO payloads of this project in the official runtime, with eager as the judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.openvino import OpenvinoPartitioner
from lowerdeck_zoo import Of, assert_close, program
from tests.interop.runs import check, delegates, run

from openvino_cases import CASES, Case  # isort: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_operator_runs_there_and_equals_eager(case: Case, tmp_path: Path) -> None:
    exported = torch.export.export(Of(case.function), case.inputs)
    lowered = to_backend(exported, OpenvinoPartitioner())
    assert len(delegates(lowered)) == 1
    file = emit(lowered).to_bytes()
    for folder in (None, tmp_path):
        found = run(file, [case.inputs], folder)[0]
        assert_close(found, case.function(*case.inputs), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["small_cnn", "small_mobilenet", "small_decoder"])
def test_models_whose_precision_the_device_chooses_are_near(name: str, tmp_path: Path) -> None:
    chosen, partitioner = program(name), OpenvinoPartitioner(keep_precision=False)
    calls = [call.args for call in chosen.calls()]
    check(chosen.module(), *calls, folder=tmp_path, tolerance=4e-2, partitioner=partitioner)


def windows(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Attend in shifted windows as Swin does, with a mask made of sizes alone."""
    batch, height, width, channels = x.shape
    mask = x.new_zeros((height, width))
    for count, rows in enumerate(((0, -4), (-4, -2), (-2, None))):
        mask[rows[0] : rows[1], -4:] = count
    mask = mask.view(height // 4, 4, width // 4, 4).permute(0, 2, 1, 3).reshape(-1, 16)
    mask = mask.unsqueeze(1) - mask.unsqueeze(2)
    mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
    x = torch.roll(x, (-2, -2), (1, 2)).view(batch, height // 4, 4, width // 4, 4, channels)
    query, key, value = m.qkv(x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, channels)).chunk(3, -1)
    scores = (query @ key.transpose(1, 2)) * 0.25 + mask.repeat(batch, 1, 1)
    return torch.as_tensor(scores.softmax(-1) @ value)


@pytest.mark.parametrize("decomposed", [False, True])
def test_masks_of_sizes_alone_cut_nothing(decomposed: bool, tmp_path: Path) -> None:
    model, inputs = Of(windows, qkv=nn.Linear(16, 48)).eval(), (torch.randn(2, 8, 12, 16),)
    exported = torch.export.export(model, inputs)
    exported = exported.run_decompositions() if decomposed else exported
    lowered = to_backend(exported, OpenvinoPartitioner())
    assert len(delegates(lowered)) == 1
    (found,) = run(emit(lowered).to_bytes(), [inputs], tmp_path)
    assert_close(found, model(*inputs), rtol=1e-5, atol=2e-5)
