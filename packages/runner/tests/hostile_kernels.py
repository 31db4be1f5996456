"""Calls kernels with arguments that no compiler writes, each call in a child that may die.

Every tensor lies right before a page that nobody may touch, so that reading or writing one byte
too many kills the child; the parent tells which call it was. Run as a script::

    python hostile_kernels.py TRIALS SEED [KERNEL ...]

prints one JSON line: the number of calls, and each that crashed or hung, with its seed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lowerdeck.runner import RunnerError, load
from lowerdeck.runner.values import arena
from lowerdeck.serializer import (
    AllocationDetails,
    Bool,
    BoolList,
    Buffer,
    Chain,
    Double,
    DoubleList,
    EValue,
    ExecutionPlan,
    Instruction,
    Int,
    IntList,
    KernelCall,
    Null,
    Operator,
    OptionalTensorList,
    Program,
    ScalarType,
    String,
    Tensor,
    TensorList,
    TensorShapeDynamism,
    kernel_names,
    runtime_kernels,
)

PAGE = mmap.PAGESIZE
SECONDS = 10
_DTYPES = {
    torch.float32: ScalarType.FLOAT,
    torch.float64: ScalarType.DOUBLE,
    torch.float16: ScalarType.HALF,
    torch.bfloat16: ScalarType.BFLOAT16,
    torch.int64: ScalarType.LONG,
    torch.int32: ScalarType.INT,
    torch.int16: ScalarType.SHORT,
    torch.int8: ScalarType.CHAR,
    torch.uint8: ScalarType.BYTE,
    torch.bool: ScalarType.BOOL,
    torch.complex64: ScalarType.COMPLEX_FLOAT,
    torch.uint16: ScalarType.UINT16,
    torch.uint64: ScalarType.UINT64,
    torch.float8_e5m2: ScalarType.FLOAT8E5M2,
}
_SIZES = (0, 1, 1, 2, 2, 3, 4, 5, 8)
_INTS = (0, 1, 1, 1, 2, 2, 3, -1, -1, -2, 4, 7, 100, -100, 2**31, -(2**31), 2**62, -(2**63))
_INDICES = (0, 0, 1, 1, 2, -1, -2, 3, 7, 100, -100, 2**31, 2**62, -(2**63))
_DOUBLES = (0.0, 1.0, 0.5, 2.0, -1.0, 1e-5, 1e300, float("nan"), float("inf"), -float("inf"))
_STRINGS = ("none", "tanh", "floor", "trunc", "mean", "x", "")
_libc = ctypes.CDLL(None, use_errno=True)
_held: list[Any] = []


def guarded_bytes(size: int) -> torch.Tensor:
    """Return ``size`` zeroed bytes that end right before memory that nobody may touch."""
    inner = max(-(-size // PAGE), 1) * PAGE
    block = mmap.mmap(-1, inner + 2 * PAGE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(block))
    for page in (first, first + PAGE + inner):
        assert _libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) == 0
    _held.append(block)
    if size == 0:
        return torch.zeros(0, dtype=torch.uint8)
    return torch.frombuffer(block, dtype=torch.uint8, count=size, offset=PAGE + inner - size)


class GuardedArena(arena.Arena):
    """Planned memory between two pages that nobody may touch."""

    def __init__(self, size: int, *, shared: bool = False) -> None:
        super().__init__(0, shared=shared)
        self.bytes, self.size = guarded_bytes(size), size


@dataclass
class Trial:
    """One call of one kernel."""

    kernel: str
    letters: str
    rng: random.Random
    program: Program = field(default_factory=Program)
    plan: ExecutionPlan = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng
        self.plan = ExecutionPlan("forward", chains=[Chain()], non_const_buffer_sizes=[0])
        self.program.execution_plan.append(self.plan)
        rank = rng.choice((0, 1, 2, 2, 3, 3, 4, 4, 4, 5))
        self.shape = [rng.choice(_SIZES) for _ in range(rank)]
        self.kind = rng.choice((torch.float32, torch.float32, torch.float32, *_DTYPES))
        self.length = rng.choice((0, 1, 1, 2, 2, 2, 3, rank))
        self.tame = rng.random() < 0.8

    def build(self) -> Program:
        short, _, overload = self.kernel.partition(".")
        self.plan.operators.append(Operator(short, overload))
        arguments, _, _ = self.letters.partition(">")
        args = [self.value(self.item(letter)) for letter in arguments]
        self.plan.chains[0].instructions.append(
            Instruction(KernelCall(0, [*args, self.value(Null())]))
        )
        return self.program

    def value(self, item: Any) -> int:
        self.plan.values.append(EValue(item))
        return len(self.plan.values) - 1

    def item(self, letter: str) -> Any:
        rng = self.rng
        if letter in "tjJmgcr" and rng.random() < 0.3:
            return Null()
        match letter:
            case "T" | "t" | "W":
                return self.tensor(written=letter == "W")
            case "V" | "L":
                items = [self.value(self.tensor(letter == "V")) for _ in range(rng.randint(0, 4))]
                return TensorList(items)
            case "O":
                return OptionalTensorList([self.entry() for _ in range(rng.randint(0, 4))])
            case "i" | "j":
                return Int(self.integer())
            case "I" | "J":
                return IntList([self.value(Int(self.integer())) for _ in range(self.count())])
            case "n" | "m":
                return rng.choice((Int(self.integer()), Double(rng.choice(_DOUBLES)), Bool(True)))
            case "f" | "g":
                return Double(rng.choice(_DOUBLES))
            case "b" | "c":
                return Bool(rng.random() < 0.5)
            case "B":
                return BoolList([rng.random() < 0.5 for _ in range(rng.randint(2, 4))])
            case "F":
                return DoubleList([rng.choice(_DOUBLES) for _ in range(self.count())])
            case _:
                return String(rng.choice(_STRINGS))

    def integer(self) -> int:
        return self.rng.choice((0, 1, 1, 2, 3, -1) if self.rng.random() < 0.7 else _INTS)

    def count(self) -> int:
        return self.length if self.rng.random() < 0.8 else self.rng.randint(0, 6)

    def entry(self) -> int:
        return -1 if self.rng.random() < 0.3 else self.value(self.tensor(index=True))

    def tensor(self, written: bool = False, index: bool = False) -> Tensor:
        rng = self.rng
        shape = list(self.shape)
        change = rng.random()
        if change < 0.2:
            shape = [rng.choice(_SIZES) for _ in range(rng.randint(0, 5))]
        elif change < 0.4 and shape:
            shape[rng.randrange(len(shape))] = rng.choice(_SIZES)
        elif change < 0.55:
            shape = shape[: rng.randint(0, len(shape))]
        kinds = (torch.int64, torch.int64, torch.int32, torch.bool) if index else tuple(_DTYPES)
        if index or (rng.random() < 0.15) or (not self.tame and rng.random() < 0.5):
            kind = rng.choice(kinds)
        else:
            kind = self.kind if rng.random() < 0.85 else torch.int64
        tensor = Tensor(_DTYPES[kind], sizes=shape, dim_order=list(range(len(shape))))
        if len(shape) == 4 and rng.random() < 0.15:
            tensor.dim_order = [0, 2, 3, 1]
        if written and rng.random() < 0.4:
            tensor.shape_dynamism = TensorShapeDynamism.DYNAMIC_BOUND
        memory = self.plan.non_const_buffer_sizes
        if len(memory) > 1 and rng.random() < 0.1:
            where = rng.randrange(1, len(memory))  # the bytes of another tensor
            memory[where] = max(memory[where], tensor.nbytes)
        else:
            where = len(memory)
            memory.append(tensor.nbytes)
        tensor.allocation_info = AllocationDetails.at(where, 0)
        if not written:
            self.program.mutable_data.append(Buffer(self.content(tensor.nbytes, kind)))
            tensor.data_buffer_idx = len(self.program.mutable_data) - 1
        return tensor

    def content(self, size: int, kind: torch.dtype) -> bytes:
        rng, count = self.rng, size // kind.itemsize
        if not count:
            return b""
        if kind.is_floating_point or kind.is_complex:
            near = [
                rng.choice((0.0, 0.5, 1.0, -1.0, 3.0, 1e30, float("nan"))) for _ in range(count)
            ]
            made = torch.tensor(near, dtype=torch.float64).to(kind)
        else:
            small = rng.random() < 0.6
            pool = (0, 0, 1, 1) if small else _INDICES
            made = torch.tensor([rng.choice(pool) for _ in range(count)]).to(kind)
        return bytes(made.view(torch.uint8).numpy().tobytes())


def call(kernel: str, seed: int) -> str:
    """Run one call, and return how it ended."""
    rng = random.Random(f"{kernel} {seed}")
    row = runtime_kernels()[kernel]
    trial = Trial(kernel, f"{row.arguments}>{row.returned}", rng)
    program = trial.build()
    _held.clear()
    try:
        load(program).method().run_flat([])
    except RunnerError as error:
        return type(error).__name__
    return "ran"


def search(kernels: list[str], trials: int, start: int) -> dict[str, Any]:
    """Return how many calls ran, and those that killed their process."""
    todo = [(kernel, seed) for kernel in kernels for seed in range(start, start + trials)]
    shared = mmap.mmap(-1, PAGE)
    crashed, at = [], 0
    while at < len(todo):
        shared[:16] = at.to_bytes(8, "little") + bytes(8)
        child = os.fork()
        if child == 0:
            _child(todo, at, shared)
        _, status = os.waitpid(child, 0)
        at = int.from_bytes(shared[:8], "little")
        if status == 0:
            break
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)
        crashed.append((*todo[at], number))
        at += 1
    return {"calls": len(todo), "crashed": crashed, "ran": int.from_bytes(shared[8:16], "little")}


def _child(todo: list[tuple[str, int]], at: int, shared: mmap.mmap) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    code = 0
    try:
        for index in range(at, len(todo)):
            shared[:8] = index.to_bytes(8, "little")
            signal.alarm(SECONDS)
            ended = call(*todo[index])
            if ended == "ran":
                shared[8:16] = (int.from_bytes(shared[8:16], "little") + 1).to_bytes(8, "little")
    except BaseException as error:
        print(f"{todo[index]}: {type(error).__name__}: {error}", file=sys.stderr)
        code = 99
    os._exit(code)


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    arena.MAX_BYTES = 1 << 24
    patched: Callable[..., Any] = GuardedArena
    sys.modules["lowerdeck.runner.program"].Arena = patched  # type: ignore[attr-defined]
    trials, seed, *kernels = words
    print(json.dumps(search(kernels or sorted(kernel_names()), int(trials), int(seed))))


if __name__ == "__main__":
    main(sys.argv[1:])
