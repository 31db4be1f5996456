"""Partitions that a cluster preprocesses: Dask's ``distributed``, workers in processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from lowerdeck.lowered_module import (
    CompileSpec,
    LoweredProgram,
    PreprocessError,
    SharedWeights,
    lower,
    register_backend,
    unregister_backend,
)
from lowerdeck.lowered_module.testing import RunPartitioner
from tests.interop import cluster_backends

distributed = pytest.importorskip("distributed")
PARTITIONS = 6


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """A client of two workers, each a process of its own."""
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def backends() -> Iterator[None]:
    """The backends whose calls leave traces, found by their names."""
    register_backend(cluster_backends.Noting)
    register_backend(cluster_backends.Mortal)
    yield
    unregister_backend("Noting")
    unregister_backend("Mortal")


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    """A program of six linear layers, each a partition that owns its weights."""
    layers: list[torch.nn.Module] = []
    for _ in range(PARTITIONS):
        layers += [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Softmax(-1)]
    return torch.export.export(torch.nn.Sequential(*layers).eval(), (torch.randn(2, 64),))


def lowered_by(
    backend: str, program: ExportedProgram, folder: Path, **options: Any
) -> LoweredProgram:
    specs = (CompileSpec("folder", os.fsencode(folder)),)
    chosen = RunPartitioner(
        lambda node: "softmax" not in str(node.target), backend_id=backend, compile_specs=specs
    )
    return lower(program, chosen, **options)


def test_two_workers_give_equal_bytes(
    client: Any, program: ExportedProgram, tmp_path: Path
) -> None:
    wanted = lowered_by("Noting", program, tmp_path).to_bytes()
    for note in tmp_path.iterdir():
        note.unlink()
    found = lowered_by("Noting", program, tmp_path, executor=client.get_executor())
    assert found.to_bytes() == wanted
    processes = [note.name.partition(".")[0] for note in tmp_path.iterdir()]
    assert len(processes) == PARTITIONS
    assert str(os.getpid()) not in processes
    assert len(set(processes)) == 2


def test_the_work_of_a_killed_worker_is_done_again(
    client: Any, program: ExportedProgram, tmp_path: Path
) -> None:
    wanted = lowered_by("Noting", program, tmp_path).program
    for note in tmp_path.iterdir():
        note.unlink()
    found = lowered_by("Mortal", program, tmp_path, executor=client.get_executor()).program
    assert (tmp_path / "killed").exists()
    assert len(list(tmp_path.glob("[0-9]*"))) > PARTITIONS, "nothing was done again"
    blobs = [bytes(one.data) for one in wanted.backend_delegate_data]
    assert [bytes(one.data) for one in found.backend_delegate_data] == blobs
    assert len(blobs) == PARTITIONS


def test_weights_come_through_a_directory_even_where_a_worker_is_killed(
    client: Any, program: ExportedProgram, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    wanted = lowered_by("Noting", program, notes).program
    with SharedWeights(client.get_executor(), tmp_path) as executor:
        found = lowered_by("Mortal", program, notes, executor=executor).program
        # Biases are too small for a file.
        assert executor.written == PARTITIONS * 64 * 64 * 4
    assert (notes / "killed").exists()
    blobs = [bytes(one.data) for one in wanted.backend_delegate_data]
    assert [bytes(one.data) for one in found.backend_delegate_data] == blobs


def test_what_a_backend_raises_in_a_worker_names_the_partition(
    client: Any, program: ExportedProgram, tmp_path: Path
) -> None:
    with pytest.raises(PreprocessError, match=r"'run 1' with FileNotFoundError"):
        lowered_by("Noting", program, tmp_path / "none", executor=client.get_executor())
