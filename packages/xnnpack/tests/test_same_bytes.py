"""The same program gives the same bytes, whoever compiles it, wherever and however often."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import MethodProgramsPartitionerSpec, lower, to_backend
from lowerdeck.xnnpack import XnnpackPartitioner

SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from test_same_bytes import digest
print(digest())
"""


class Model(nn.Module):
    """Two branches with weights alike, state, and what XNNPACK does not take between."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weights(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(sizes, generator=generator))

        self.first, self.second = weights(8, 8), weights(8, 8)
        self.third = nn.Parameter(self.first.detach().clone())
        self.kernel = weights(4, 2, 3, 3)
        self.register_buffer("state", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Return a value and change the state."""
        self.state.add_(x)
        one = torch.relu(nn.functional.linear(x, self.first)).cumsum(0)
        other = torch.sigmoid(nn.functional.linear(x, self.second)).cumsum(0)
        image = nn.functional.conv2d(one.reshape(1, 2, 4, 4), self.kernel)
        return image.sum() + nn.functional.linear(one + other, self.third) + self.state


def lowered_bytes(executor: Executor | None = None, cache: Path | None = None) -> bytes:
    """Return the file of the model, lowered for XNNPACK."""
    program = torch.export.export(Model(), (torch.ones(4, 8),))
    partitioned: Any = to_backend(program, XnnpackPartitioner(), executor=executor, cache=cache)
    return emit(partitioned).to_bytes()


def digest() -> str:
    """Return a digest of the file, for another process to compare."""
    return hashlib.sha256(lowered_bytes()).hexdigest()


@pytest.fixture(scope="module")
def expected() -> bytes:
    return lowered_bytes()


def test_in_threads_and_processes(expected: bytes) -> None:
    spawn = get_context("spawn")
    for executor in (ThreadPoolExecutor(3), ProcessPoolExecutor(2, mp_context=spawn)):
        with executor:
            assert lowered_bytes(executor) == expected


def test_with_a_cold_and_a_warm_cache(expected: bytes, tmp_path: Path) -> None:
    assert lowered_bytes(cache=tmp_path) == expected
    assert list(tmp_path.glob("*.result"))
    assert lowered_bytes(cache=tmp_path) == expected


def test_in_a_process_with_another_hash_seed(expected: bytes) -> None:
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        SCRIPT.format(folder=str(Path(__file__).parent)),
    ]
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split()[-1] == hashlib.sha256(expected).hexdigest()


def test_methods_in_any_order_of_the_mapping() -> None:
    state, x = Model(), (torch.ones(4, 8),)
    programs = {name: torch.export.export(state, x) for name in ("one", "two")}

    def methods(*names: str) -> bytes:
        ordered = {name: programs[name] for name in names}
        partitioners = {name: XnnpackPartitioner() for name in names}
        lowered: Any = to_backend(MethodProgramsPartitionerSpec(ordered, partitioners))
        return emit({name: lowered[name] for name in names}).to_bytes()

    assert methods("one", "two") == methods("two", "one")


def test_bounds_give_the_file_of_dimensions_with_a_maximum() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))

    def file(dim: Any, **options: Any) -> bytes:
        program = torch.export.export(layers, (torch.ones(4, 8),), dynamic_shapes=({0: dim},))
        return lower(program, XnnpackPartitioner(), **options).buffer

    assert file(torch.export.Dim.AUTO, bounds=32) == file(torch.export.Dim.AUTO(max=32))
