"""Lower one random raw program every way, run it everywhere, and say what came of it.

Each program is exported and then emitted as it is, lowered in arbitrary partitions (run by our
runner alone), and lowered for XNNPACK. Files are loaded from a path and from bytes. Eager is the
judge.
"""

from __future__ import annotations

import copy
import random
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.emitter import EmitterError, emit
from lowerdeck.graph_fuser import GraphFuserError, propose_partitions
from lowerdeck.lowered_module import (
    DelegationSpec,
    LoweringError,
    MethodProgramsPartitionerSpec,
    Partitioner,
    PartitionResult,
    get_lowered_backend_modules,
    tag_constant_data,
    tag_mutated_buffer,
    to_backend,
)
from lowerdeck.runner import load
from lowerdeck.xnnpack import XnnpackPartitioner, XnnpackRuntime
from lowerdeck_zoo import official
from lowerdeck_zoo.executor_backend import ExecutorRuntime
from tests.soak.raw_programs import RawProgram, raw_program

REFUSALS = (EmitterError, LoweringError, GraphFuserError)
ALL = ("emitted", "partitions", "owning partitions", "xnnpack")
"""The ways: emitted as it is, and lowered in three."""

Results = list[tuple[list[Tensor], list[Tensor] | None]]


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one way of one program.

    Attributes:
        seed: The program.
        way: How it was lowered and run.
        outcome: ``right``, ``wrong``, ``failed``, ``crashed``, ``refused``; ``torch`` if its own
            program is wrong, exported or decomposed; ``rounding`` if eager differs as much when
            its inputs change by a rounding (the sign of what sums to 0, say).
        detail: The refusal's reason, or what is wrong.
    """

    seed: int
    way: str
    outcome: str
    detail: str = ""


class ScatteredPartitioner(Partitioner):
    """Tags arbitrary nodes, the same ones whenever it sees the same names.

    Args:
        seed: What is arbitrary.
        state: Whether partitions own constants, and the buffers that they change.
    """

    def __init__(self, seed: int, state: bool) -> None:
        super().__init__()
        self._seed = seed
        self._state = state
        self._share = random.Random(seed).choice((0.3, 0.6, 0.9))

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with tags."""

        def wanted(node: Node) -> bool:
            drawn = zlib.crc32(f"{self._seed} {node.name}".encode()) / (1 << 32)
            return isinstance(node.target, torch._ops.OpOverload) and drawn < self._share

        tags = {}
        for number, nodes in enumerate(propose_partitions(exported_program.graph_module, wanted)):
            tags[f"p{number}"] = DelegationSpec("ExecutorBackend", [])
            for node in nodes:
                node.meta["delegation_tag"] = f"p{number}"
        if self._state:
            tag_constant_data(exported_program)
            tag_mutated_buffer(exported_program)
        return PartitionResult(exported_program, tags)


def findings(seed: int, lib: Any, ways: Iterable[str] = ALL) -> Iterator[Finding]:
    """Yield what came of each way of the program of ``seed``.

    Args:
        seed: The program.
        lib: The official runtime's binding.
        ways: Which of ``ALL``.
    """
    warnings.simplefilter("ignore")
    program = raw_program(seed)
    try:
        # Eager itself refuses some sizes that dynamic dimensions allow.
        expected = program.expected()
        exported = _exported(program)
        as_torch = _in_torch(program, exported)
    except Exception as error:
        yield Finding(seed, "torch.export", "torch", f"{type(error).__name__}: {_first(error)}")
        return
    wrong = _difference(as_torch, expected)
    if wrong:
        yield Finding(seed, "torch.export", "torch", wrong)
        return
    runs: dict[str, Callable[[], Iterator[tuple[str, Results]]]] = {
        "emitted": lambda: _everywhere(lib, program, exported, {}),
        "partitions": lambda: _partitions(lib, program, exported, state=False),
        "owning partitions": lambda: _partitions(lib, program, exported, state=True),
        "xnnpack": lambda: _xnnpack(lib, program, exported),
    }
    for way in ways:
        try:
            for where, results in runs[way]():
                wrong = _difference(results, expected)
                outcome = "right"
                if wrong and _is_lost_by_torch(program, exported, results):
                    outcome = "torch"
                elif wrong:
                    outcome = "rounding" if _rounds(program) else "wrong"
                yield Finding(seed, f"{way}, {where}", outcome, wrong)
        except REFUSALS as error:
            yield Finding(seed, way, "refused", f"{type(error).__name__}: {_first(error)}")
        except Exception as error:
            yield Finding(seed, way, "failed", f"{type(error).__name__}: {_first(error)}")


def _rounds(program: RawProgram) -> bool:
    """Return whether roundings of what a program is given change what eager returns."""
    torch.manual_seed(program.seed)
    expected = program.expected()
    return any(_difference(program.expected(noise=1e-6), expected) for _ in range(8))


def _exported(program: RawProgram) -> dict[str, ExportedProgram]:
    return {
        name: torch.export.export(
            model, program.example(name), dynamic_shapes=program.dynamic_shapes()
        )
        for name, model in program.models().items()
    }


def _in_torch(program: RawProgram, exported: Mapping[str, ExportedProgram]) -> Results:
    """Return what torch itself makes of the exported programs; methods share their state."""
    if len(exported) > 1:
        # Modules of two programs have states of their own.
        return program.expected()  # type: ignore[return-value]
    # Its module shares the program's state.
    module = copy.deepcopy(exported["forward"]).module()
    found: Results = []
    for _, inputs in program.calls:
        own = [value.clone() for value in inputs]
        found.append(([value.clone() for value in module(*own)], own))
    return found


def _is_lost_by_torch(
    program: RawProgram, exported: Mapping[str, ExportedProgram], results: Results
) -> bool:
    """Return whether torch's own decomposition has the same wrong results."""
    try:
        decomposed = {
            name: copy.deepcopy(one).run_decompositions() for name, one in exported.items()
        }
    except AssertionError:
        return False  # torch fails on some writes, so nothing excuses the results
    modules = {name: one.module() for name, one in decomposed.items()}
    found: Results = []
    for name, inputs in program.calls:
        own = [value.clone() for value in inputs]
        found.append(([value.clone() for value in modules[name](*own)], own))
        # Methods share their state, torch's modules do not.
        state = {key: tensor.clone() for key, tensor in _state(modules[name])}
        for module in modules.values():
            for key, tensor in _state(module):
                tensor.data.copy_(state[key])
    return not _difference(results, found)


def _state(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _everywhere(
    lib: Any,
    program: RawProgram,
    exported: Mapping[str, ExportedProgram],
    runtimes: Mapping[str, Any],
    *,
    theirs: bool = True,
) -> Iterator[tuple[str, Results]]:
    emitted = emit(dict(exported))
    data = emitted.to_bytes()
    for memory in ("strict", "poison"):
        yield f"runner {memory}", _in_runner(program, data, memory, runtimes)
    if not theirs:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pte"
        path.write_bytes(data)
        for where, source in (("bytes", data), ("a path", path)):
            yield f"official from {where}", _in_official(lib, program, source)


def _in_runner(
    program: RawProgram, data: bytes, memory: Any, runtimes: Mapping[str, Any]
) -> Results:
    loaded = load(data, memory=memory, backends=dict(runtimes))
    found: Results = []
    for name, inputs in program.calls:
        own = [value.clone() for value in inputs]
        outputs = loaded.method(name).run_flat(own)
        found.append(([value.clone() for value in outputs], own))
    return found


def _in_official(lib: Any, program: RawProgram, source: bytes | Path) -> Results:
    made = [
        official.Call([value.clone() for value in inputs], name) for name, inputs in program.calls
    ]
    # Methods share their state in the Program API only; the Module API maps the file as apps do.
    shared = len(program.methods) > 1
    case = official.Case(source, made, verify=False, shared_arenas=shared)
    ran = official.run_here(lib, case)
    assert isinstance(ran, official.Ran), ran
    return list(zip(ran.outputs, ran.inputs, strict=True))


def _partitions(
    lib: Any, program: RawProgram, exported: Mapping[str, ExportedProgram], *, state: bool
) -> Iterator[tuple[str, Results]]:
    lowered = _lowered(exported, ScatteredPartitioner(program.seed, state))
    runtimes = {"ExecutorBackend": ExecutorRuntime()}
    yield from _everywhere(lib, program, lowered, runtimes, theirs=False)


def _lowered(
    exported: Mapping[str, ExportedProgram], partitioner: Partitioner
) -> Mapping[str, ExportedProgram]:
    # Together, so that no method takes for a constant what another one changes.
    methods = MethodProgramsPartitionerSpec(exported, dict.fromkeys(exported, partitioner))
    lowered: Mapping[str, ExportedProgram] = to_backend(methods)
    return lowered


def _xnnpack(
    lib: Any, program: RawProgram, exported: Mapping[str, ExportedProgram]
) -> Iterator[tuple[str, Results]]:
    lowered = _lowered(exported, XnnpackPartitioner())
    if any(get_lowered_backend_modules(one.graph_module) for one in lowered.values()):
        yield from _everywhere(lib, program, lowered, {"XnnpackBackend": XnnpackRuntime()})


def _difference(found: Results, expected: Any) -> str:
    for number, ((outputs, inputs), (outputs_wanted, inputs_wanted)) in enumerate(
        zip(found, expected, strict=True)
    ):
        pairs = [("output", outputs, outputs_wanted)]
        if inputs is not None:
            pairs.append(("input", inputs, inputs_wanted))
        for kind, ours, wanted in pairs:
            if len(ours) != len(wanted):
                return f"call {number}: {len(ours)} {kind}s, expected {len(wanted)}"
            for index, (one, other) in enumerate(zip(ours, wanted, strict=True)):
                if one.shape != other.shape:
                    return f"call {number}: {kind} {index} is {one.shape}, not {other.shape}"
                if not torch.allclose(one, other, atol=1e-4, rtol=1e-4):
                    off = float((one - other).abs().max())
                    return f"call {number}: {kind} {index} is off by {off:.3g}"
    return ""


def _first(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
