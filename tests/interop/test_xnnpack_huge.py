"""More than 4 GB of weights: lowered with little memory, and found by the official runtime."""

from __future__ import annotations

import json
import multiprocessing
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lowerdeck.emitter import EmitConfig, emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import official

LAYERS, SEEN, WIDTH = 4, 8, 16384 + 256
"""Four layers of so many inputs and outputs have 4.4 GB of floats."""


class Wide(nn.Module):
    """Parallel layers, each of a weight that is stored in a file; their last results."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        weights = [self._weight(folder, number) for number in range(LAYERS)]
        self.weights = nn.ParameterList(weights)

    def _weight(self, folder: Path, number: int) -> nn.Parameter:
        # A file of holes, but for the last rows: those of different layers are different.
        data = torch.from_file(str(folder / f"weight{number}"), shared=True, size=WIDTH**2)
        data = data.view(WIDTH, WIDTH)
        data[-SEEN:] = torch.randn(SEEN, WIDTH)
        return nn.Parameter(data, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last results of each layer."""
        return torch.cat([F.linear(x, one)[:, -SEEN:] for one in self.weights], 1)

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same, of the rows alone that are looked at."""
        return torch.cat([x @ one[-SEEN:].t() for one in self.weights], 1)


def _lower(folder: Path, weights_file: str | None, told: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Wide(folder)
    x = torch.randn(1, WIDTH)
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
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux reports memory")
@pytest.mark.parametrize("weights_file", [None, "weights"])
def test_gigabytes_of_weights_are_lowered_and_found(
    weights_file: str | None, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    process = context.Process(target=_lower, args=(tmp_path, weights_file, told))
    process.start()
    found = told.get(timeout=1800)
    process.join()
    print(json.dumps(found | {"weights_file": weights_file}))
    assert found["size"] > 4 << 30
    assert found["peak"] <= found["size"] / 5
    for one in tmp_path.glob("weight[0-9]"):
        one.unlink()
    data = None if weights_file is None else tmp_path / "weights.ptd"
    stored = data or tmp_path / "model.pte"
    assert stored.stat().st_size > 4 << 30
    x, wanted = torch.load(tmp_path / "io")
    outputs = official.outputs(
        tmp_path / "model.pte", [(x,)], data=data, verify=False, timeout=900.0
    )
    torch.testing.assert_close(outputs[0][0], wanted, rtol=1e-3, atol=1e-3)
