"""lowerdeck.serializer against ExecuTorch 1.4.1: writing, reading, opening, and what they cost.

The peer's serializer needs the whole of executorch (``nox -s bench``); without it only our own
figures are given.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, cpu_seconds, fresh_process, growth_exponent, in_rounds, paired
from lowerdeck import serializer as pte

PACKAGE = "serializer"
_MB = 1 << 20


def rows(quick: bool) -> Iterator[Row]:
    """Yield every row; ``quick`` keeps to small sizes."""
    peer = _peer()
    yield from _instructions(quick, peer)
    yield from _open(quick)
    yield from _big_constants(quick)


def program_of(count: int) -> pte.Program:
    """Return a program of ``count`` kernel calls, like those of a real model.

    Every call makes a separate tensor in planned memory; shapes, operators and scalars recur.
    """
    operators = [pte.Operator(f"aten::op_{i}", "out") for i in range(60)]
    shapes = [[1, 2**i, 7 * j] for i in range(8) for j in range(1, 5)]
    values = [pte.EValue(pte.Int(i)) for i in range(50)]
    values += [pte.EValue(pte.IntList([i, i + 1])) for i in range(40)]
    first = len(values)
    values += [
        pte.EValue(
            pte.Tensor(
                pte.ScalarType.FLOAT,
                sizes=list(shapes[i % len(shapes)]),
                dim_order=[0, 1, 2],
                allocation_info=pte.AllocationDetails.at(1, 16 * (i * 7919 % (count + 5))),
            )
        )
        for i in range(count + 2)
    ]
    steps = [
        pte.Instruction(
            pte.KernelCall(
                i % 60, [first + i, first + i + 1, i % 90, first + i + 2, first + i + 2]
            )
        )
        for i in range(count)
    ]
    plan = pte.ExecutionPlan(
        "forward",
        pte.ContainerMetadata("[]", "[]"),
        values,
        [first, first + 1],
        [first + count + 1],
        [pte.Chain(instructions=steps)],
        operators,
        [],
        [0, 16 * (count + 5) + 4096],
    )
    return pte.Program(execution_plan=[plan])


@dataclass(frozen=True)
class Peer:
    """ExecuTorch's own serializer."""

    schema: Any
    module: Any
    file: Any

    def write(self, program: Any, named: Any = None, *, extract: bool = True) -> bytes:
        """Return a program of theirs as a file."""
        file = self.file(program=program, named_data=named)
        return bytes(self.module._serialize_pte_binary(file, extract_delegate_segments=extract))

    def read(self, data: bytes) -> Any:
        """Return the program of a file as theirs."""
        return self.module._deserialize_pte_binary(data)


def _peer() -> Peer | None:
    if importlib.util.find_spec("executorch") is None:
        return None
    try:
        module = importlib.import_module("executorch.exir._serialize")
        schema = importlib.import_module("executorch.exir.schema")
        program = importlib.import_module("executorch.exir._serialize._program")
    except ImportError:
        # The runtime alone (``--no-deps``) is installed: nothing to compare with.
        return None
    return Peer(schema, module, program.PTEFile)


def _to_peer(peer: Peer, program: pte.Program) -> Any:
    """Return the same program in their classes."""
    return peer.read(pte.serialize_pte(program)).program


def _instructions(quick: bool, peer: Peer | None) -> Iterator[Row]:
    for count in (1_000, 10_000) if quick else (1_000, 10_000, 100_000):
        yield from _of_size(count, peer)
    counts = (5_000, 10_000, 20_000) if quick else (25_000, 50_000, 100_000)
    programs = [program_of(count) for count in counts]
    costs = in_rounds([partial(_write_cost, program) for program in programs])
    exponent = growth_exponent(zip(counts, costs, strict=True))
    yield Row(
        PACKAGE,
        "growth of writing over instructions",
        exponent,
        unit="exponent",
        goal="<= 1.1",
        met=exponent <= 1.1,
    )


def _write_cost(program: pte.Program) -> float:
    return cpu_seconds(lambda: pte.serialize_pte(program), repeat=1)


def _of_size(count: int, peer: Peer | None) -> Iterator[Row]:
    program = program_of(count)
    data = pte.serialize_pte(program)
    what = f"{count} instructions"
    if peer is None:
        yield Row(PACKAGE, f"write {what}", cpu_seconds(lambda: pte.serialize_pte(program)))
        yield Row(PACKAGE, f"read {what}", cpu_seconds(lambda: pte.deserialize_pte(data)))
        return
    big = count >= 10_000
    repeat = 3 if count < 100_000 else 1
    theirs = _to_peer(peer, program)
    ours, other = paired(
        lambda: pte.serialize_pte(program), lambda: peer.write(theirs), repeat=repeat
    )
    yield _compared(f"write {what}", ours, other, 10 if big else None)
    ours = _peak(lambda: pte.serialize_pte(program)) / _MB
    other = _peak(lambda: peer.write(theirs)) / _MB
    yield _compared(f"peak memory of writing {what}", ours, other, 4, unit="MB")
    other_data = peer.write(theirs)
    ours, other = paired(
        lambda: pte.deserialize_pte(data), lambda: peer.read(other_data), repeat=repeat
    )
    yield _compared(f"read {what}", ours, other, 5 if big else None)
    sizes = len(data) / _MB, len(other_data) / _MB
    yield _compared(f"file of {what}", *sizes, 1, unit="MB")


# The peak that getrusage tells is inherited from the parent; this one is the process's own.
_PEAK = """
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
"""
_OPEN = """
import sys, io, time, contextlib
from lowerdeck.inspect.command_line import main
import lowerdeck.inspect.commands.inspect
before = peak()
start = time.perf_counter()
with contextlib.redirect_stdout(io.StringIO()):
    main(["inspect", sys.argv[1]])
seconds = time.perf_counter() - start
print("FIGURE seconds", seconds)
print("FIGURE extra", (peak() - before) / 1024)
"""


def _open(quick: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "big.pte"
        size = (100 if quick else 500) * _MB
        pte.write_pte(_weights(size // 10, 10), path)
        found = fresh_process(_PEAK + _OPEN, str(path))
    what = f"open and summarise a file of {size // _MB} MB"
    seconds, extra = found["seconds"], found["extra"]
    yield Row(PACKAGE, what, seconds, goal="<= 0.05 s", met=seconds <= 0.05, note="wall")
    yield Row(
        PACKAGE, f"{what}: memory", extra, unit="MB", goal="none for the data", met=extra < 16
    )


def _weights(size: int, count: int) -> pte.Program:
    """Return a program with ``count`` constants of about ``size`` bytes, no two of them equal."""
    memory = memoryview(os.urandom(size + 4096 * count))
    program = program_of(100)
    for index in range(count):
        view = memory[4096 * index : 4096 * index + size]
        program.constant_buffer.append(pte.Buffer(view))
        tensor = pte.Tensor(
            pte.ScalarType.BYTE, sizes=[size], dim_order=[0], data_buffer_idx=index + 1
        )
        program.execution_plan[0].values.append(pte.EValue(tensor))
    return program


_BIG = """
import os, sys, time
sys.path.insert(0, sys.argv[4])
from benchmarks.bench_serializer import _weights
from lowerdeck.serializer import write_pte
program = _weights(int(sys.argv[2]), int(sys.argv[3]))
views = [buffer.storage for buffer in program.constant_buffer]
def plain():
    with open(sys.argv[1] + ".tmp", "wb", buffering=0) as file:
        for view in views:
            for start in range(0, len(view), 1 << 24):
                file.write(view[start : start + (1 << 24)])
        os.fsync(file.fileno())
    os.replace(sys.argv[1] + ".tmp", sys.argv[1])
before = peak()
times = [], []
for _ in range(4):
    for chosen, action in zip(times, (lambda: write_pte(program, sys.argv[1]), plain)):
        start = time.perf_counter()
        action()
        chosen.append(time.perf_counter() - start)
print("FIGURE seconds", min(times[0]))
print("FIGURE plain", min(times[1]))
print("FIGURE extra", (peak() - before) / 1024)
"""


def _big_constants(quick: bool) -> Iterator[Row]:
    count = 8
    size = (32 if quick else 256) * _MB
    total = size * count / _MB
    with tempfile.TemporaryDirectory() as folder:
        target = str(Path(folder) / "big.pte")
        root = str(Path(__file__).resolve().parents[1])
        found = fresh_process(_PEAK + _BIG, target, str(size), str(count), root)
    seconds, plain = found["seconds"], found["plain"]
    what = f"write {total:.0f} MB of constants"
    yield Row(
        PACKAGE,
        what,
        seconds,
        plain,
        goal="speed of a plain file write",
        met=seconds < 1.25 * plain,
        note="wall, best of 4; beside file.write, fsync and rename of the same bytes",
    )
    share = 100 * found["extra"] / total
    yield Row(
        PACKAGE, f"{what}: extra memory", share, unit="% of the data", goal="< 5 %", met=share < 5
    )


def _compared(
    case: str, ours: float, other: float | None, times: float | None, *, unit: str = "s"
) -> Row:
    """Return a row whose goal is to be so many times better than the peer."""
    if other is None or times is None:
        return Row(PACKAGE, case, ours, other, unit)
    goal = f">= {times:g}x better" if times > 1 else "never more"
    return Row(PACKAGE, case, ours, other, unit, goal, other >= times * ours)


def _peak(action: Callable[[], object]) -> int:
    """Return the most memory in bytes that Python held at once for ``action``."""
    tracemalloc.start()
    action()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak
