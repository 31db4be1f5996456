"""Native code of InductorBackend in the runner beside ExecuTorch's own file in its runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Row
from benchmarks.workers import MODELS, PEER_PORTABLE, PRELUDE, REPORT, RUN, worker

PACKAGE = "demo_backends"

_NATIVE = """
from lowerdeck.demo_backends import InductorPartitioner, InductorRuntime
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.runner import load
program = to_backend(exported, InductorPartitioner())
runtimes = {"InductorBackend": InductorRuntime(allow_native_code=True)}
method = load(emit(program).to_bytes(), backends=runtimes).method("forward")
method(*inputs)
times = []
for _ in range(10):
    start = time.process_time()
    method(*inputs)
    times.append(time.process_time() - start)
print(json.dumps({"seconds": sorted(times)[5]}))
"""


def rows(quick: bool) -> Iterator[Row]:
    """Yield the time to run each model, compiled to native code.

    Args:
        quick: Measure one model only.
    """
    for model in MODELS[:1] if quick else MODELS:
        with tempfile.TemporaryDirectory() as folder:
            yield _native_row(model, Path(folder) / "peer_portable")


def _native_row(model: str, file: Path) -> Row:
    native = worker(PRELUDE + _NATIVE, model)["seconds"]
    worker(PRELUDE + PEER_PORTABLE + REPORT, model, file)
    portable = worker(RUN, model, file)["seconds"]
    return Row(
        *(PACKAGE, f"run {model} compiled by InductorBackend, in the runner", native, portable),
        note="peer: ExecuTorch's own file without a delegate, in the official runtime",
    )
