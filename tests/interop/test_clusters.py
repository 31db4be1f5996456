"""Partitions that a cluster preprocesses: Dask's ``distributed``, workers in processes.

A worker that is killed leaves, once in some hundred times, a scheduler that never says that its
work is done (dask/distributed#3196). Nothing may wait for that: work has ``SECONDS``, and where
it is stuck another cluster tries again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
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
SECONDS = 180.0
"""Of a few that the work takes: a busy machine is no reason to try again."""


@contextlib.contextmanager
def two_workers() -> Iterator[Any]:
    """Give a client of two workers, each a process of its own."""
    # Any free port: a second run of this suite on the machine has the usual one.
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0"
    )
    client = distributed.Client(cluster)
    try:
        yield client
    finally:
        for one in (client, cluster):
            with contextlib.suppress(TimeoutError):
                one.close(timeout=30)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """A client of two workers that nothing kills."""
    with two_workers() as client:
        yield client


def with_killing(work: Callable[[Any, Path], None], folder: Path) -> None:
    """Do work with a cluster of its own and in a folder of its own, again where it is stuck."""
    for attempt in range(3):
        own = folder / str(attempt)
        own.mkdir()
        with two_workers() as client:
            if ended(work, client, own):
                return
    pytest.fail(f"no end within {SECONDS} s, three times")


def ended(work: Callable[..., None], *args: Any) -> bool:
    """Return whether work ends in time; what it raises is raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work(*args)
        except BaseException as error:
            raised.append(error)

    # A daemon: one that is stuck keeps this process no longer than its tests.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if thread.is_alive():
        return False
    if raised:
        raise raised[0]
    return True


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


def test_the_work_of_a_killed_worker_is_done_again_with_weights_from_a_directory(
    program: ExportedProgram, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()

    def work(client: Any, folder: Path) -> None:
        wanted = lowered_by("Noting", program, folder).program
        for note in folder.iterdir():
            note.unlink()
        with SharedWeights(client.get_executor(), weights) as executor:
            found = lowered_by("Mortal", program, folder, executor=executor).program
            # Biases are too small for a file.
            assert executor.written == PARTITIONS * 64 * 64 * 4
        assert (folder / "killed").exists()
        assert len(list(folder.glob("[0-9]*"))) > PARTITIONS, "nothing was done again"
        blobs = [bytes(one.data) for one in wanted.backend_delegate_data]
        assert [bytes(one.data) for one in found.backend_delegate_data] == blobs
        assert len(blobs) == PARTITIONS

    with_killing(work, tmp_path)


def test_what_a_backend_raises_in_a_worker_names_the_partition(
    client: Any, program: ExportedProgram, tmp_path: Path
) -> None:
    with pytest.raises(PreprocessError, match=r"'run 1' with FileNotFoundError"):
        lowered_by("Noting", program, tmp_path / "none", executor=client.get_executor())
