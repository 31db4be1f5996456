"""Quantised models of torchao: what stays whole, and what is taken apart as torch does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.decompose import decompose, explain

pytest.importorskip("torchao")
sys.path.insert(0, str(Path(__file__).parents[2] / "packages/decompose/tests"))
from program_likeness import differences
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.testing.pt2e._xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from torchao.utils import unwrap_tensor_subclass

pytestmark = pytest.mark.filterwarnings("ignore")


def _quantised(program: Any) -> list[str]:
    return sorted(str(n.target) for n in program.graph.nodes if "quant" in str(n.target))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_what_pt2e_writes_stays_whole(dynamic: bool, per_channel: bool) -> None:
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
    args = (torch.randn(1, 3, 8, 8),)
    config = get_symmetric_quantization_config(is_per_channel=per_channel, is_dynamic=dynamic)
    quantizer = XNNPACKQuantizer().set_global(config)
    model = nn.Sequential(*layers).eval()
    prepared = prepare_pt2e(torch.export.export(model, args).module(), quantizer)
    prepared(*args)
    program = torch.export.export(convert_pt2e(prepared), args)
    assert explain(program).reason is None
    found = decompose(program)
    assert _quantised(found) == _quantised(program)
    assert any("quantized_decomposed.dequantize" in name for name in _quantised(found))
    assert not differences(found, program.run_decompositions())


def test_affine_operators_are_kept_where_asked() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    program = torch.export.export(unwrap_tensor_subclass(model), (torch.randn(2, 64),))
    assert explain(program).reason is None
    # torch takes them apart: they are composites.
    assert not _quantised(decompose(program))
    assert not differences(decompose(program), program.run_decompositions())
    kept = {n.target for n in program.graph.nodes if "torchao" in str(n.target)}
    found = decompose(program, keep=kept)
    assert _quantised(found) == _quantised(program) != []


def test_weights_that_are_tensor_subclasses_become_their_inner_tensors() -> None:
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    program = torch.export.export(model, (torch.randn(2, 64),))
    assert explain(program).reason is None
    assert not differences(decompose(program), program.run_decompositions())
