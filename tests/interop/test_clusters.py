"""Partitions that a cluster preprocesses: Dask's ``distributed``, workers in processes."""

from __future__ import annotations

import contextlib
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
    # Any free port: a second run of this suite on the machine has the usual one.
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0"
    )
    client = distributed.Client(cluster)
    yield client
    for one in (client, cluster):
        with contextlib.suppress(TimeoutError):
            one.close(timeout=30)


@pytest.fixture(autouse=True)
def backends() -> Iterator[None]:
    """The backend whose calls leave traces, found by its name."""
    register_backend(cluster_backends.Noting)
    yield
    unregister_backend("Noting")


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
    notes = tmp_path / "notes"
    notes.mkdir()
    wanted = lowered_by("Noting", program, notes).to_bytes()
    for note in notes.iterdir():
        note.unlink()
    with client.get_executor() as executor:
        found = lowered_by("Noting", program, notes, executor=executor)
    assert found.to_bytes() == wanted
    processes = [note.name.partition(".")[0] for note in notes.iterdir()]
    assert len(processes) == PARTITIONS
    assert str(os.getpid()) not in processes
    assert len(set(processes)) == 2


def test_what_a_backend_raises_in_a_worker_names_the_partition(
    client: Any, program: ExportedProgram, tmp_path: Path
) -> None:
    with pytest.raises(PreprocessError, match=r"'run \d' with FileNotFoundError"):
        lowered_by("Noting", program, tmp_path / "none", executor=client.get_executor())
