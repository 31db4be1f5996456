"""ExecuTorch's own OpenVINO files are opened to what is in them, as ours are."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.inspect.report.operators import contents_of
from lowerdeck.serializer import deserialize_pte

# Of executorch, against importlib and against itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

MODELS: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, int]]] = {
    "images": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)),
        (torch.ones(1, 3, 16, 16),),
        {"Convolution": 1, "Add": 1, "ReLU": 1, "MaxPool": 1},
    ),
    "wide": (
        nn.Sequential(nn.Linear(256, 512), nn.Softmax(-1), nn.Linear(512, 256)),
        (torch.ones(64, 256),),
        {"FullyConnected": 2, "SoftMax": 1},
    ),
}


@pytest.fixture(scope="module")
def lower() -> Any:
    """Return ExecuTorch's lowering, without its quantiser, which needs more than is installed."""
    door = "executorch.backends.openvino.quantizer"
    for name in (door, f"{door}.quantizer"):
        sys.modules.setdefault(name, types.ModuleType(name))
        vars(sys.modules[name]).setdefault("OpenVINOQuantizer", None)
    exir = pytest.importorskip("executorch.exir")
    specs = importlib.import_module("executorch.exir.backend.compile_spec_schema")
    partition = importlib.import_module("executorch.backends.openvino.partitioner")

    def _lower(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> bytes:
        chosen = partition.OpenvinoPartitioner([specs.CompileSpec("device", b"CPU")])
        program = torch.export.export(model.eval(), inputs)
        edge = exir.to_edge_transform_and_lower(program, partitioner=[chosen])
        return bytes(edge.to_executorch().buffer)

    return _lower


@pytest.mark.parametrize("name", MODELS)
def test_payloads_of_the_peer_are_opened(name: str, lower: Any) -> None:
    model, inputs, wanted = MODELS[name]
    (blob,) = deserialize_pte(lower(model, inputs)).backend_delegate_data
    found = contents_of(memoryview(bytes(blob.data)), "OpenvinoBackend")  # type: ignore[arg-type]
    assert found.closed == ""
    assert wanted.items() <= found.operators.items()
    assert found.constant_bytes >= sum(one.numel() * 4 for one in model.parameters())
    assert (found.links[0], found.results) == ((-1,), {1: len(found.lines) - 1})
    assert not any("?" in line for line in found.lines)
