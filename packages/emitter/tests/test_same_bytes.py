"""The same program gives the same bytes: in each process, in threads, after other emissions."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

from lowerdeck.emitter import EmitConfig, emit


class Everything(nn.Module):
    """Has state, constants of several forms, branches, views, attention and sizes that vary."""

    kept: torch.Tensor
    turned: torch.Tensor
    again: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        values = torch.arange(48.0).view(6, 8) / 7
        self.register_buffer("kept", torch.zeros(8))
        self.register_buffer("turned", values.t())
        self.register_buffer("again", values.t().clone())
        self.weight = nn.Parameter(values[:, ::2].contiguous())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.kept.add_(x.sum(0))
        heads = x.view(-1, 2, 4).transpose(0, 1).unsqueeze(0)
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        chosen = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x @ self.turned,))
        parts = (chosen + x @ self.again).split([2, 4], 1)
        order = torch.sort(parts[0], 0)[0]
        return {"z": seen.mean(), "a": order @ self.weight[:2], "m": parts[1] + 1, "k": self.kept}


def program() -> ExportedProgram:
    rows = Dim("rows", min=2, max=9)
    return export(Everything().eval(), (torch.ones(3, 8),), dynamic_shapes=({0: rows},))


def digest(exported: ExportedProgram | None = None) -> str:
    """Return the hash of both files of two methods."""
    given = program() if exported is None else exported
    config = EmitConfig(weights_file="weights", constant_methods={"get_b": 2, "get_a": 1.5})
    emitted = emit({"two": given, "one": given}, config=config)
    files = [emitted.to_bytes(), *emitted.external_files().values()]
    return hashlib.sha256(b"".join(files)).hexdigest()


def test_the_bytes_do_not_depend_on_the_process_or_its_hashes() -> None:
    found = set()
    for seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(Path(__file__).resolve())],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout.strip())
    assert found == {digest()}


def test_a_second_emission_and_a_second_export_give_the_same_bytes() -> None:
    exported = program()
    assert digest(exported) == digest(exported) == digest()


def test_other_emissions_before_change_nothing() -> None:
    first = digest()
    emit(export(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU()), (torch.ones(1, 3, 8, 8),)))
    emit(export(nn.Sequential(nn.LayerNorm(4), nn.Softmax(-1)), (torch.ones(2, 1, 4),)))
    assert digest() == first


def test_emissions_in_threads_give_the_same_bytes() -> None:
    programs = [program() for _ in range(8)]
    wanted = digest()
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(digest, programs)) == {wanted}


if __name__ == "__main__":
    print(digest())
