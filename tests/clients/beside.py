"""Export classes of transformers with its own exporter and with ours, one after the other.

    nox -s clients -- beside [CLASS...] [--modes static dynamic] [--write]

``ExecutorchExporter`` lowers with ExecuTorch's exir under transformers' patches,
``LowerdeckExporter`` without them. Each export has a fork and 240 s of CPU; lowering is the CPU
time of an export without that of ``torch.export``. Files run in the official runtime.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from lowerdeck.serializer import deserialize_pte
from lowerdeck_zoo import official
from lowerdeck_zoo.models.libraries import import_torchvision
from tests import resumable
from tests.clients import run
from tests.clients.classes import CLIENTS, EXPORTED, Client
from tests.interop.forks import run_in_fork

ENGINES = ("exir", "Lowerdeck")
CLASSES = (
    *("BertModel", "ModernBertModel", "LlamaForCausalLM", "MambaForCausalLM", "GPT2LMHeadModel"),
    *("T5ForConditionalGeneration", "WhisperForConditionalGeneration", "ViTModel", "SwinModel"),
    *("ResNetModel", "CLIPModel", "MixtralForCausalLM"),
)
HEADING = "## Comparison with transformers' own exporter"
_RUNS = 11


def of_class(name: str, modes: Iterable[str]) -> Iterator[run.Record]:
    """Yield what came of a class in each mode with each engine."""
    for mode in modes:
        for engine in ENGINES:
            found, failed = run_in_fork(
                lambda mode=mode, engine=engine: steps(CLIENTS[name], mode, engine), run.SECONDS, 3
            )
            record = {"class": name, "mode": mode, "engine": engine, "outcome": "failed"}
            record["why"] = failed
            for step in found:
                record |= step
            yield record


def steps(client: Client, mode: str, engine: str) -> Iterator[run.Record]:
    """Yield what comes of each step with a class, from export to the official runtime."""
    from transformers.exporters import ExecutorchConfig

    model, program = run.exported_program(client, mode)
    calls = list(run.calls_of(client, model, program, mode))
    exporter = _exporter(engine, program)
    seconds = _time_exports()
    config = ExecutorchConfig(dynamic=mode == "dynamic")
    inputs = client.inputs(EXPORTED, model.config)
    began = time.process_time()
    try:
        manager, _ = exporter.export_program(client.model(), inputs, config)
        data = bytes(manager.buffer)
    except Exception as error:
        yield {"why": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"}
        return
    lower_s = time.process_time() - began - sum(seconds)
    yield {"lower_s": round(lower_s, 2), **run.facts_of(deserialize_pte(data))}
    yield run.compared(data, calls)
    with official.OfficialRuntime() as runtime:
        case = official.Case(data, [official.Call(calls[0][0])] * _RUNS)
        ran = runtime.run(case, timeout=120)
    if isinstance(ran, official.Ran):
        yield {"run_ms": round(1000 * statistics.median(ran.seconds[1:]), 2)}


def _exporter(engine: str, program: Any) -> Any:
    if engine == "Lowerdeck":
        from lowerdeck.exir_compat.hugging_face import LowerdeckExporter

        return LowerdeckExporter(bounds=run.bounds_of(program) or None)
    from transformers.exporters.exporter_executorch import ExecutorchExporter

    return ExecutorchExporter()


def _time_exports() -> list[float]:
    """Return a list to which each call of torch's exporter adds its CPU time."""
    from transformers.exporters.exporter_dynamo import DynamoExporter

    seconds: list[float] = []
    export = DynamoExporter.export_program

    def timed(*args: Any, **named: Any) -> Any:
        began = time.process_time()
        try:
            return export(*args, **named)
        finally:
            seconds.append(time.process_time() - began)

    DynamoExporter.export_program = timed
    return seconds


def section(rows: Iterable[run.Record]) -> str:
    """Return the section of the page with both engines' outcomes."""
    by = {(row["class"], row["mode"], row["engine"]): row for row in rows}
    text = [
        HEADING,
        "",
        "`nox -s clients -- beside --write` compares transformers' `ExecutorchExporter`, which",
        "patches torch and exir and lowers with exir 1.4.1, with `LowerdeckExporter`, each in",
        "a separate process limited to 240 s of CPU: CPU time of lowering; delegates, kernel",
        "calls; median time of a call in the official runtime.",
        "",
        "| class | sizes | exir | Lowerdeck |",
        "|---|---|---|---|",
    ]
    for name, mode in dict.fromkeys((name, mode) for name, mode, _ in by):
        cells = [_cell(by.get((name, mode, engine))) for engine in ENGINES]
        text.append(f"| {name} | {mode} | {' | '.join(cells)} |")
    return "\n".join([*text, ""])


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    if "lower_s" not in row:
        return f"failed: {row['why'][:90]}".replace("|", "/")
    calls = f"{row['delegates']}, {row['kernels']}"
    cell = f"{row['lower_s']:.2f} s; {calls}"
    if "run_ms" in row:
        cell = f"{cell}; {row['run_ms']:.2f} ms"
    return cell if row["outcome"] == "right" else f"{cell}; **fails at another size**"


def main() -> int:
    """Try the classes that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", nargs="*", default=list(CLASSES))
    parser.add_argument("--modes", nargs="*", default=["static", "dynamic"])
    parser.add_argument("--write", action="store_true", help="write the section of the page")
    args = resumable.arguments(parser, "beside")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import_torchvision()
    # What torch and transformers import and fill when they first export is then in each fork.
    for engine in ENGINES:
        for _ in steps(CLIENTS["ResNetModel"], "static", engine):
            pass
    known = resumable.records(
        args, args.classes, "class", lambda name: list(of_class(name, args.modes))
    )
    for row in known:
        print(*(f"{value}" for value in row.values()))
    if args.write:
        before = run.PAGE.read_text().partition(HEADING)[0]
        run.PAGE.write_text(f"{before.rstrip()}\n\n{section(known)}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
