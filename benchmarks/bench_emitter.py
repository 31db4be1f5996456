"""Time, memory, instructions and file size of emission, against ExecuTorch's own compiler."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram, export

from benchmarks.emitter_models import MODELS
from benchmarks.harness import Row, cpu_seconds, growth_exponent, in_rounds, paired
from lowerdeck.emitter import EmitConfig, Place, PlanRequest, emit, one_memory
from lowerdeck.emitter.memory.lifetimes import most_live_bytes

PEER = "executorch 1.4.1, to_edge().to_executorch()"


def rows(quick: bool) -> Iterator[Row]:
    """Yield the measurements; without the full executorch the peer's columns stay empty."""
    warnings.simplefilter("ignore")
    chosen = {"GPT-2-like 4x256": MODELS["GPT-2-like 4x256"]} if quick else MODELS
    for name, (build, example) in chosen.items():
        torch.manual_seed(0)
        module = build().eval()
        yield from _model(name, export(module, example()), quick)
    yield _growth(quick)


def _peer() -> Callable[[ExportedProgram], Any] | None:
    if importlib.util.find_spec("executorch") is None:
        return None
    with suppress(ImportError):
        from executorch.exir import to_edge

        return lambda exported: to_edge(exported).to_executorch()
    return None


def _model(name: str, exported: ExportedProgram, quick: bool) -> Iterator[Row]:
    peer = _peer()
    emit(exported)  # imports and caches, which neither side is charged for
    if peer is not None:
        theirs_result = peer(exported)
        ours, theirs = paired(
            lambda: emit(exported).to_bytes(),
            lambda: peer(exported).buffer,
            repeat=1 if quick else 3,
        )
    else:
        theirs_result, theirs = None, None
        ours = cpu_seconds(lambda: emit(exported).to_bytes())
    yield Row(
        package="emitter",
        case=f"{name}: export to bytes",
        ours=ours,
        peer=theirs,
        goal="<= 1/3 of the peer",
        met=None if theirs is None else ours <= theirs / 3,
        note=PEER,
    )
    yield from _sizes(name, exported, theirs_result)


def _sizes(name: str, exported: ExportedProgram, theirs: Any) -> Iterator[Row]:
    bounds: list[int] = []

    def planner(request: PlanRequest) -> list[Place]:
        bounds.append(most_live_bytes(list(request.lives)))
        return one_memory(request)

    emitted = emit(exported, config=EmitConfig(memory_planner=planner))
    plan = emitted.program.execution_plan[0]
    other = theirs.executorch_program.execution_plan[0] if theirs is not None else None
    figures = (
        ("planned memory", sum(plan.non_const_buffer_sizes), "B"),
        ("instructions", len(plan.chains[0].instructions), ""),
        ("file", len(emitted.to_bytes()), "B"),
    )
    for what, ours, unit in figures:
        peer = None
        if other is not None:
            peer = {
                "planned memory": lambda: sum(other.non_const_buffer_sizes),
                "instructions": lambda: len(other.chains[0].instructions),
                "file": lambda: len(theirs.buffer),
            }[what]()
        strict = what in ("instructions", "file")
        met = None if peer is None else (ours < peer if strict else ours <= peer)
        goal = "fewer than the peer" if strict else "<= the peer"
        yield Row("emitter", f"{name}: {what}", ours, peer, unit, goal, met)
    planned, bound = plan.non_const_buffer_sizes[1], bounds[0]
    yield Row(
        "emitter",
        f"{name}: planned memory over the bound of live bytes",
        planned / max(bound, 1),
        unit="x",
        goal="<= 1.01",
        met=planned <= 1.01 * bound,
    )


def chain_graph(length: int) -> ExportedProgram:
    """Return a program of about ``length`` nodes without tracing it operator by operator."""
    exported = export(nn.ReLU(), (torch.ones(4, 4),))
    graph = exported.graph
    (relu,) = [node for node in graph.nodes if node.op == "call_function"]
    (output,) = [node for node in graph.nodes if node.op == "output"]
    last, kept = relu, relu
    with graph.inserting_before(output):
        for index in range(length):
            target = torch.ops.aten.sin.default if index % 7 else torch.ops.aten.add.Tensor
            args = (last,) if index % 7 else (last, kept)
            node = graph.call_function(target, args)
            node.meta["val"] = relu.meta["val"]
            kept = last if index % 50 == 0 else kept
            last = node
    output.args = ((last,),)
    spec = exported.graph_signature.output_specs[0]
    spec.arg.name = last.name
    return exported


def _growth(quick: bool) -> Row:
    sizes = (1000, 2000, 4000) if quick else (3125, 6250, 12500, 25000, 50000)
    programs = [chain_graph(size) for size in sizes]
    emissions = [partial(emit, program) for program in programs]
    costs = in_rounds([partial(cpu_seconds, each, repeat=1) for each in emissions])
    exponent = growth_exponent(zip(sizes, costs, strict=True))
    return Row(
        package="emitter",
        case=f"own passes, {sizes[0]} to {sizes[-1]} nodes: growth",
        ours=exponent,
        unit="exponent",
        goal="<= 1.1",
        met=exponent <= 1.1,
        note=f"{costs[-1] / sizes[-1] * 1e6:.0f} us a node at the largest",
    )
