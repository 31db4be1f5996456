"""Lower many models on a cluster that is not there: measured tasks, simulated workers.

    python -m benchmarks.simulate_cluster [--link BYTES_PER_SECOND] [--slower 1 100]

Each task (a model and a backend, or a partition) is run once here and its processor time taken.
Workers are simulated: a task goes to whoever is free first, as Dask gives it out, once its bytes
have left by the one link of the machine that gives tasks out. Not simulated are disks, and
machines of different speed.
"""

from __future__ import annotations

import argparse
import heapq
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.export_models import Blocks, llama
from lowerdeck.lowered_module import lower
from lowerdeck.lowered_module.testing import RunPartitioner

WORKERS = (1, 2, 4, 8, 16, 32, 64)
COPIES = 2
"""How often each measured model is in the fleet: 20 measured ones stand for 40."""
Job = tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Task:
    """One unit of work: what it takes, and how many bytes it brings along."""

    name: str
    seconds: float
    sent: int = 0


def finished(tasks: Iterable[Task], workers: int, start: float, link: float) -> float:
    """Return when the last task ends, each given to the worker that is free first.

    Args:
        tasks: In the order in which they are given out.
        workers: How many there are.
        start: When workers are ready.
        link: Bytes a second that leave the machine that gives tasks out.
    """
    free = [start] * workers
    sent = 0.0
    for task in tasks:
        sent += task.sent / link
        begin = max(heapq.heappop(free), sent)
        heapq.heappush(free, begin + task.seconds)
    return max(free)


def _fleet() -> dict[str, Job]:
    tokens = (torch.randint(0, 1000, (1, 16)),)
    fleet: dict[str, Job] = {}
    for layers in (1, 2, 4, 8, 12):
        encoder = nn.TransformerEncoderLayer(64, 4, 128)
        fleet[f"encoder {layers}"] = (
            lambda encoder=encoder, layers=layers: nn.TransformerEncoder(encoder, layers),
            (torch.randn(16, 2, 64),),
        )
    for layers in (2, 4, 8, 16):
        fleet[f"llama {layers}"] = (lambda layers=layers: llama(layers), tokens)
    for blocks in (8, 16, 32, 64, 128, 256):
        fleet[f"blocks {blocks}"] = (lambda blocks=blocks: Blocks(blocks), (torch.randn(2, 16),))
    for width in (64, 128, 256, 512, 1024):
        layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)]
        fleet[f"mlp {width}"] = (
            lambda layers=layers: nn.Sequential(*layers),
            (torch.randn(1, width),),
        )
    return fleet


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    found = call()
    return time.process_time() - begin, found


class Measuring(Executor):
    """Does at once, here, what it is given, and notes what that took and how many bytes it was."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call ``fn`` with what another process would get."""
        sent = pickle.dumps((fn, args, kwargs))
        future: Future[Any] = Future()
        begin = time.process_time()
        fn, args, kwargs = pickle.loads(sent)
        future.set_result(fn(*args, **kwargs))
        spent = time.process_time() - begin
        self.tasks.append(Task(f"partition {len(self.tasks)}", spent, len(sent)))
        return future


def models_by_backends() -> list[Task]:
    """Return the tasks of lowering each model with XNNPACK and without a backend, measured."""
    tasks = []
    for name, (make, inputs) in _fleet().items():
        for backend in ("XnnpackBackend", None):
            begin = time.process_time()
            lower((make().eval(), inputs), backend).to_bytes()
            tasks.append(Task(f"{name}, {backend}", time.process_time() - begin))
    return tasks * COPIES


def one_model(blocks: int) -> tuple[float, list[Task]]:
    """Return what the machine that lowers one model does itself, in seconds, and its partitions.

    Args:
        blocks: How many blocks the model has, each a partition.
    """
    layers = [(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512)) for _ in range(blocks)]
    model = nn.Sequential(*(layer for block in layers for layer in block)).eval()
    chosen = RunPartitioner(
        lambda node: "layer_norm" not in str(node.target), backend_id="XnnpackBackend"
    )
    executor = Measuring()
    begin = time.process_time()
    lower((model, (torch.randn(2, 512),)), chosen, executor=executor).to_bytes()
    spent = time.process_time() - begin
    return spent - sum(task.seconds for task in executor.tasks), executor.tasks


def import_seconds() -> float:
    """Return the processor time that a worker takes until it can work."""
    code = "import time, lowerdeck.lowered_module as m, lowerdeck.xnnpack; m.lower; "
    words = [sys.executable, "-c", code + "print(time.process_time())"]
    return float(subprocess.run(words, check=True, capture_output=True).stdout)


def told(title: str, tasks: Sequence[Task], serial: float, start: float, link: float) -> None:
    """Print how the time shrinks with workers, and what it cannot be less than.

    Args:
        title: What is lowered.
        tasks: What workers do.
        serial: What is done before and after on one machine, in seconds.
        start: When workers are ready.
        link: Bytes a second that leave that machine.
    """
    work = sum(task.seconds for task in tasks)
    longest = max(tasks, key=lambda task: task.seconds)
    sent = sum(task.sent for task in tasks)
    print(f"\n{title}: {len(tasks)} tasks, {work:.1f} s of work, {sent / 1e6:.1f} MB sent")
    print(f"  at least {serial:.2f} s on one machine, {longest.seconds:.2f} s for {longest.name},")
    print(f"  {start:.2f} s until workers are ready, {sent / link:.2f} s on the link")
    print("  workers  seconds  times as fast  longest first")
    ordered = sorted(tasks, key=lambda task: -task.seconds)
    alone = serial + work
    for workers in WORKERS:
        took = serial + finished(tasks, workers, start, link)
        best = serial + finished(ordered, workers, start, link)
        print(f"  {workers:7}  {took:7.1f}  {alone / took:13.1f}  {alone / best:13.1f}")


def main() -> None:
    """Measure, simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--link", type=float, default=1e8, help="bytes a second (a Gbit/s link)")
    parser.add_argument("--slower", type=float, nargs="*", default=[1, 100])
    parser.add_argument("--blocks", type=int, default=64)
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = import_seconds()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one_model(2)  # what torch does at its first export only
        fleet = models_by_backends()
        serial, parts = one_model(given.blocks)
    count = len(fleet) // 2
    told(f"{count} models x 2 backends", fleet, 0, start, given.link)
    for factor in given.slower:
        slower = [replace(task, seconds=factor * task.seconds) for task in parts]
        title = f"one model, a compiler that takes {factor:g} times what XNNPACK's takes"
        told(title, slower, serial, start, given.link)


if __name__ == "__main__":
    main()
