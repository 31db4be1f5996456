"""The same program gives the same bytes: in each process, in threads, after other emissions."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from lowerdeck.emitter import EmitConfig, emit
from lowerdeck_zoo import exported


class Everything(nn.Module):
    """Has state, constants of several forms, branches, views, attention and sizes that vary."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.arange(48.0).view(6, 8) / 7
        self.register_buffer("kept", torch.zeros(8))
        self.register_buffer("turned", values.t())
        self.register_buffer("again", values.t().clone())
        self.weight = nn.Parameter(values[:, ::2].contiguous())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        kept = self.get_buffer("kept").add_(x.sum(0))
        heads = x.view(-1, 2, 4).transpose(0, 1).unsqueeze(0)
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        turned = x @ self.get_buffer("turned")
        chosen = torch.cond(x.sum() > 0, torch.sin, torch.cos, (turned,))
        parts = (chosen + x @ self.get_buffer("again")).split([2, 4], 1)
        order = torch.sort(parts[0], 0)[0]
        return {"z": seen.mean(), "a": order @ self.weight[:2], "m": parts[1] + 1, "k": kept}


def export() -> ExportedProgram:
    rows = Dim("rows", min=2, max=5)
    return exported(Everything(), torch.ones(3, 8), dynamic_shapes=({0: rows},))


def digest(program: ExportedProgram) -> str:
    """Return the hash of both files of two methods."""
    config = EmitConfig(weights_file="weights", constant_methods={"get_b": 2, "get_a": 1.5})
    emitted = emit({"two": program, "one": program}, config=config)
    files = [emitted.to_bytes(), *emitted.external_files().values()]
    return hashlib.sha256(b"".join(files)).hexdigest()


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return export()


@pytest.fixture(scope="module")
def expected(program: ExportedProgram) -> str:
    return digest(program)


def test_the_bytes_do_not_depend_on_the_process_or_its_hashes(expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).resolve())],
        env={**os.environ, "PYTHONHASHSEED": "4242"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == expected, done.stderr


def test_a_second_emission_after_others_gives_the_same_bytes(
    program: ExportedProgram, expected: str
) -> None:
    emit(exported(nn.Sequential(nn.LayerNorm(4), nn.Softmax(-1)), torch.ones(2, 1, 4)))
    assert digest(program) == expected


def test_emissions_in_threads_give_the_same_bytes(program: ExportedProgram, expected: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(digest, [deepcopy(program) for _ in range(2)])) == {expected}


def test_a_pickled_or_copied_emission_gives_the_same_files() -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh())
    for config in (EmitConfig(), EmitConfig(weights_file="weights")):
        emitted = emit(exported(model, torch.ones(1, 40)), config=config)
        for again in (pickle.loads(pickle.dumps(emitted)), deepcopy(emitted)):
            assert again.to_bytes() == emitted.to_bytes()
            assert again.external_files() == emitted.external_files()


if __name__ == "__main__":
    print(digest(export()))
