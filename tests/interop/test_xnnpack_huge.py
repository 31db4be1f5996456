"""More than 4 GB of weights: lowered with little memory, and found by the official runtime."""

from __future__ import annotations

import json
import multiprocessing
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lowerdeck_zoo import official

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packages" / "xnnpack" / "tests"))
from quantized_cases import IntegerWeight, by_row

from lowerdeck.emitter import EmitConfig, emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.xnnpack import XnnpackPartitioner

pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)
LAYERS, SEEN = 4, 8
WIDTHS = {"fp32": 16384 + 256, "8da4w": 32768 + 512}
"""Inputs and outputs of a layer: four have 4.4 GB of floats, or of integers, one in a byte."""


class Wide(nn.Module):
    """Layers beside each other, each of a weight that lies in a file; their last results."""

    def __init__(self, folder: Path, mode: str) -> None:
        super().__init__()
        self.width, self.mode = WIDTHS[mode], mode
        self.weights: Any = nn.ModuleList(self._weight(folder, number) for number in range(LAYERS))

    def _weight(self, folder: Path, number: int) -> Any:
        dtype = torch.int8 if self.mode == "8da4w" else torch.float32
        path, shape = str(folder / f"weight{number}"), (self.width, self.width)
        # A file of holes, but for the last rows: those of different layers are different.
        data = torch.from_file(path, shared=True, size=self.width**2, dtype=dtype).view(shape)
        if dtype == torch.int8:
            weight = IntegerWeight(SEEN, self.width, group=128, bits=4)
            data[-SEEN:] = weight.integers
            weight.integers = data
            weight.scales = weight.scales[:1].expand(self.width, -1).contiguous()
            weight.zeros = weight.zeros[:1].expand(self.width, -1).contiguous()
            return weight
        data[-SEEN:] = torch.randn(SEEN, self.width)
        layer = nn.Linear(1, 1, bias=False)
        layer.weight = nn.Parameter(data, requires_grad=False)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last results of each layer."""
        if self.mode == "8da4w":
            x = by_row(x)
        found = [
            F.linear(x, one() if self.mode == "8da4w" else one.weight) for one in self.weights
        ]
        return torch.cat([one[:, -SEEN:] for one in found], 1)

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same, of the rows alone that are looked at."""
        if self.mode == "fp32":
            return torch.cat([x @ one.weight[-SEEN:].t() for one in self.weights], 1)
        parts = []
        for one in self.weights:
            scales = one.scales[-SEEN:].bfloat16().float().repeat_interleave(128, 1)
            parts.append(by_row(x) @ (one.integers[-SEEN:] * scales).t())
        return torch.cat(parts, 1)


def _lower(folder: Path, mode: str, weights_file: str | None, told: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Wide(folder, mode)
    x = torch.randn(1, model.width)
    torch.save((x, model.expected(x)), folder / "io")
    program = torch.export.export(model, (x,))
    peak = _Peak()
    lowered = to_backend(program, XnnpackPartitioner())
    emitted = emit(lowered, config=EmitConfig(weights_file=weights_file))
    emitted.save(folder / "model.pte")
    size = sum(t.numel() * t.element_size() for t in program.state_dict.values())
    told.put({"peak": peak.stop(), "size": size})


class _Peak:
    """The most memory that no file backs, beyond what there was at first."""

    def __init__(self) -> None:
        self._first = self._most = _anonymous()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self._most = max(self._most, _anonymous())

    def stop(self) -> int:
        self._over.set()
        self._watcher.join()
        return self._most - self._first


def _anonymous() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


@pytest.mark.heavy
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is told by Linux")
@pytest.mark.parametrize("weights_file", [None, "weights"])
@pytest.mark.parametrize("mode", list(WIDTHS))
def test_gigabytes_of_weights_are_lowered_and_found(
    mode: str, weights_file: str | None, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    process = context.Process(target=_lower, args=(tmp_path, mode, weights_file, told))
    process.start()
    found = told.get(timeout=1800)
    process.join()
    print(json.dumps(found | {"mode": mode, "weights_file": weights_file}))
    assert found["size"] > 4 << 30
    assert found["peak"] <= found["size"] / 5
    for one in tmp_path.glob("weight[0-9]"):
        one.unlink()
    data = None if weights_file is None else tmp_path / "weights.ptd"
    stored = data or tmp_path / "model.pte"
    assert stored.stat().st_size > (2 if mode == "8da4w" else 4) << 30
    x, wanted = torch.load(tmp_path / "io")
    outcome = official.run(
        tmp_path / "model.pte", [official.Call((x,))], data=data, verify=False, timeout=900.0
    )
    assert isinstance(outcome, official.Ran), outcome
    torch.testing.assert_close(outcome.outputs[0][0], wanted, rtol=1e-3, atol=1e-3)
