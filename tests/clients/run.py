"""Lower classes of transformers as its own exporter exports them, and compare with eager.

    nox -s clients -- [CLASS...] [--modes static dynamic] [--write]

Each is a small model with random weights, exported with fixed sizes and with every dimension
dynamic, with none of transformers' patches for ExecuTorch, lowered for XNNPACK and run in the
official runtime at the exported sizes, and where these are dynamic at two others. What is recorded
is not run again; ``--write`` writes the page.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import SymT, symbol_is_type
from torch.utils import _pytree as pytree

from lowerdeck import serializer as pte
from lowerdeck.emitter import EmitterError
from lowerdeck.lowered_module import LoweringError, lower
from lowerdeck.torch_base import expression_range
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import official
from lowerdeck_zoo.models.libraries import import_torchvision
from tests import resumable
from tests.clients.classes import CLIENTS, EXPORTED, OTHERS, Client
from tests.interop.forks import run_in_fork

PAGE = Path(__file__).resolve().parents[2] / "docs/explanation/transformers-classes.md"
SECONDS = 240
_WAITS = 3
TOLERANCE = 2e-3
"""Of the largest number of a result."""
GOOD = frozenset({"right", "not exported"})

Record = Mapping[str, Any]


def of_class(name: str, modes: Iterable[str]) -> Iterator[Record]:
    """Yield what came of a class in each mode, tried in a fork of this process."""
    for mode in modes:
        found, failed = run_in_fork(lambda mode=mode: steps(CLIENTS[name], mode), SECONDS, _WAITS)
        record: dict[str, Any] = {"class": name, "mode": mode, "outcome": "failed", "why": failed}
        for step in found:
            record |= step
        yield record


def exported_program(client: Client, mode: str) -> tuple[Any, ExportedProgram]:
    """Return a small model and its program, as transformers' exporter makes it."""
    from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter

    model = client.model()
    inputs = client.inputs(EXPORTED, model.config)
    config = DynamoConfig(dynamic=mode == "dynamic")
    return model, DynamoExporter().export_program(model, inputs, config)[0]


def bounds_of(program: ExportedProgram) -> dict[str, Any]:
    """Return bounds of all dynamic dimensions: twice the exported sizes, or what torch found.

    Sizes that depend on data without a range in the program have 128 at most.
    """
    ranges = program.range_constraints
    found: dict[str, Any] = {
        str(symbol): 128
        for symbol in ranges
        if symbol_is_type(symbol, SymT.UNBACKED_INT)
        and expression_range(symbol, ranges)[1] is None
    }
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    most = min(2 * size.node.hint, ranges[size.node.expr].upper)
                    found.setdefault(node.name, {})[dim] = int(most)
    return found


def steps(client: Client, mode: str, *, delegate: bool = True) -> Iterator[Record]:
    """Yield what comes of each step with a class, from export to the official runtime."""
    began = time.process_time()
    try:
        model, program = exported_program(client, mode)
    except Exception as error:
        yield {"outcome": "not exported", "why": _first_line(error)}
        return
    nodes = sum(node.op == "call_function" for node in program.graph.nodes)
    yield {"export_s": round(time.process_time() - began, 2), "nodes": nodes}
    try:
        calls = list(calls_of(client, model, program, mode))
    except Exception as error:
        yield {"outcome": "not exported", "why": f"torch's program: {_first_line(error)}"}
        return
    began = time.process_time()
    try:
        backends = [XnnpackPartitioner()] if delegate else []
        lowered = lower(program, backends, bounds=bounds_of(program) or None)
        data = bytes(lowered.buffer)
    except (LoweringError, EmitterError) as error:
        yield {"outcome": "refused", "why": _first_line(error)}
        return
    except Exception as error:
        yield {"outcome": "failed", "why": f"{type(error).__name__}: {_first_line(error)}"}
        return
    yield {"lower_s": round(time.process_time() - began, 3), **facts_of(lowered.program)}
    yield compared(data, calls)


def calls_of(
    client: Client, model: Any, program: ExportedProgram, mode: str
) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield inputs and results, flat, of up to three sizes that the program admits."""
    module = program.module()
    found = 0
    for size in (EXPORTED, *(OTHERS if mode == "dynamic" else ())):
        inputs = client.inputs(size, model.config)
        try:
            with torch.no_grad():
                expected = pytree.tree_leaves(module(**inputs))
                if size == EXPORTED:
                    eager = pytree.tree_leaves(model(**inputs))
                    assert _are_close(expected, eager), "torch's program is wrong"
        except (RuntimeError, AssertionError):
            if size == EXPORTED:
                raise
            continue
        yield [inputs[name] for name in inputs], expected
        found += 1
        if found == 3:
            return


def facts_of(program: pte.Program) -> Record:
    """Return how many delegates and kernel calls a file has, and the bytes of planned memory."""
    (plan,) = program.execution_plan
    instructions = [one.instr_args for chain in plan.chains for one in chain.instructions]
    return {
        "delegates": len(plan.delegates),
        "kernels": sum(isinstance(one, pte.KernelCall) for one in instructions),
        "planned": sum(plan.non_const_buffer_sizes),
    }


def compared(data: bytes, calls: list[tuple[list[Any], list[Any]]]) -> Record:
    """Compare the results of calls in the official runtime with the expected ones."""
    with official.OfficialRuntime() as runtime:
        case = official.Case(data, [official.Call(inputs) for inputs, _ in calls])
        ran = runtime.run(case, timeout=120)
    if not isinstance(ran, official.Ran):
        return {
            "outcome": "failed",
            "why": f"{type(ran).__name__}: {getattr(ran, 'message', '')} {ran.log[-300:]}",
        }
    for found, (inputs, expected) in zip(ran.outputs, calls, strict=True):
        if not _are_close(found, expected):
            return {"outcome": "wrong", "why": f"for {[tuple(one.shape) for one in inputs]}"}
    return {
        "outcome": "right",
        "why": "",
        "sizes": len(calls),
        "run_ms": round(1000 * ran.seconds[0], 2),
    }


def _are_close(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    pair = [[one for one in each if one is not None] for each in (found, expected)]
    return len(pair[0]) == len(pair[1]) and all(map(_is_close, *pair))


def _is_close(found: Any, expected: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        return bool(found == expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    finite = expected[expected.isfinite()]
    most = float(finite.abs().max()) if finite.numel() else 0.0
    # XNNPACK flushes denormals to 0.
    atol = TOLERANCE * most + torch.finfo(torch.float32).tiny
    return torch.allclose(found, expected, rtol=0, atol=atol, equal_nan=True)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " | ".join(lines[:2])[:300] or type(error).__name__


def page(rows: Iterable[Record]) -> str:
    """Return the page with the outcome of each class."""
    by = {(row["class"], row["mode"]): row for row in rows}
    text = [
        "# Classes of transformers",
        "",
        "This page lists the results of `nox -s clients -- --write` with transformers",
        f"{transformers.__version__}. Each model is small and has random weights. transformers'",
        "own exporter exports it without its patches for ExecuTorch, once with fixed sizes and",
        "once with every dimension dynamic. It is lowered for XNNPACK, run in the official",
        "runtime and compared with eager, dynamic files also at two other sizes.",
        "",
        "| class | static: delegates, kernel calls, lowering | dynamic: the same |",
        "|---|---|---|",
    ]
    for name in dict.fromkeys(name for name, _ in by):
        cells = [_cell(by.get((name, mode))) for mode in ("static", "dynamic")]
        text.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*text, ""])


def _cell(row: Record | None) -> str:
    if row is None:
        return ""
    if row["outcome"] != "right":
        return f"{row['outcome']}: {row['why'][:90]}".replace("|", "/")
    return f"{row['delegates']}, {row['kernels']}, {row['lower_s']:.2f} s"


def main() -> int:
    """Try the classes that the command line names; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", nargs="*", default=list(CLIENTS))
    parser.add_argument("--modes", nargs="*", default=["static", "dynamic"])
    parser.add_argument("--write", action="store_true", help="write the page")
    args = resumable.arguments(parser, "clients")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import_torchvision()
    # What torch and transformers import and fill when they first export is then in each fork.
    lower(exported_program(CLIENTS["LlamaForCausalLM"], "static")[1], [XnnpackPartitioner()])
    known = resumable.records(
        args, args.classes, "class", lambda name: list(of_class(name, args.modes))
    )
    rows = [row for row in known if row["class"] in args.classes]
    bad = [row for row in rows if row["outcome"] not in GOOD]
    for row in rows:
        print(*(f"{value}" for value in row.values()))
    print(f"{len(rows)} programs, {len(bad)} refused, wrong or failed")
    if args.write:
        # Another script writes what is behind.
        _, heading, rest = PAGE.read_text(encoding="utf-8").partition("\n## ")
        PAGE.write_text(page(known) + heading + rest, encoding="utf-8")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
