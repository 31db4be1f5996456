"""One program has one file by ``lower``, ``to_backend`` and ``emit``, exir_compat and ``main``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from lowerdeck.emitter import emit
from lowerdeck.exir_compat import to_edge_transform_and_lower
from lowerdeck.lowered_module import lower, to_backend
from lowerdeck.script import main
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo.models.layers import Decoder
from tests.interop.test_xnnpack_torchao import CONFIGURATIONS, weights_alone

torchao = pytest.importorskip("torchao.quantization")


def assert_one_file(program: ExportedProgram, precision: str | None = None) -> bytes:
    """Return the file of `to_backend` and `emit`, which the other ways must make too."""

    def make() -> XnnpackPartitioner:
        return XnnpackPartitioner(precision)

    direct = emit(to_backend(program, make())).to_bytes()
    compat = to_edge_transform_and_lower(program, partitioner=[make()]).to_executorch()
    assert lower(program, make()).to_bytes() == direct
    assert bytes(compat.buffer) == direct
    return direct


class Convolved(nn.Module):
    """A convolution over time, and linear layers beside views that are written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 64, 3, padding=1), nn.GroupNorm(2, 64)
        self.qkv, self.last = nn.Linear(64, 192), nn.Linear(64, 96)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.conv(x[:, :3])).relu_().transpose(1, 2)
        one, two, three = self.qkv(rows).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        mixed = (one @ two.mT).softmax(-1) @ three
        rows = mixed.transpose(1, 2).flatten(2)
        rows.flatten(1).add_(1)
        rows.mT.mul_(2)
        result: Tensor = self.last(rows)
        return result


CONFIGS: dict[str, Callable[[], Any] | None] = {
    "float": None,
    **{name: made[0] for name, made in CONFIGURATIONS.items()},
    "dynamic, Int8Tensor": lambda: torchao.Int8DynamicActivationInt8WeightConfig(
        set_inductor_config=False
    ),
    "alone, Int8Tensor": weights_alone,
}
FILE_FORMS = ("raw", "unwrapped", "functional")


# Each configuration of a matrix, which the static scale is of, or of a model with all else.
@pytest.mark.parametrize(
    ("name", "matrix", "form"),
    [
        (name, matrix or name == "static", FILE_FORMS[(number + matrix) % 3])
        for number, name in enumerate(CONFIGS)
        for matrix in (False, True)
    ],
)
def test_one_program_has_one_file(name: str, matrix: bool, form: str) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)
    model = (nn.Sequential(*layers) if matrix else Convolved()).eval().requires_grad_(False)
    if (make := CONFIGS[name]) is not None:
        torchao.quantize_(model, make())
    if form == "unwrapped":
        importlib.import_module("torchao.utils").unwrap_tensor_subclass(model)
    program = torch.export.export(model, (torch.randn((3, 64) if matrix else (2, 4, 12)),))
    if form == "functional":
        program = program.run_decompositions({})
    for precision in (None, "fp16") if name == "float" else (None,):
        assert_one_file(program, precision)


@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"dynamic": True, "weight_bits": 4}])
@pytest.mark.parametrize("precision", [None, "fp16"])
def test_one_program_of_pt2e_or_floats_has_one_file(
    precision: str | None, options: dict[str, Any]
) -> None:
    pt2e = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    quantizer = importlib.import_module("lowerdeck.xnnpack.quantizer").XnnpackQuantizer
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    model, inputs = nn.Sequential(*layers, nn.Linear(512, 10)).eval(), (torch.randn(1, 3, 8, 8),)
    program = torch.export.export(model, inputs)
    prepared = pt2e.prepare_pt2e(program.module(), quantizer(**options))
    prepared(*inputs)
    quantised = torch.export.export(pt2e.convert_pt2e(prepared), inputs)
    for one in (program, quantised):
        assert_one_file(one, precision)


# The static scale is of a matrix, and the model has batches of tokens.
@pytest.mark.parametrize("name", ["float", "dynamic, groups of int4", "alone, rows of int5"])
def test_a_language_model_has_one_file_from_the_command_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Decoder().eval().requires_grad_(False)
    if (make := CONFIGS[name]) is not None:
        torchao.quantize_(model, make())
    inputs = (torch.randn(1, 12, 64),)
    made = ModuleType("one_file_model")
    made.make = lambda: (model, inputs)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    path = tmp_path / "model.pte"
    words = ["lower", "one_file_model:make", "--backend", "XnnpackBackend", "-o", str(path)]
    assert main(words) == 0
    assert path.read_bytes() == assert_one_file(torch.export.export(model, inputs))
