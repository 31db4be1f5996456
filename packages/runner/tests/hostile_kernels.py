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
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from lowerdeck.runner import RunnerError, load
from lowerdeck.runner.values import arena
from lowerdeck.serializer import kernel_names
from lowerdeck_zoo.kernel_calls import call_of

PAGE = mmap.PAGESIZE
SECONDS = 10
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


def call(kernel: str, seed: int) -> str:
    """Run one call, and return how it ended."""
    program = call_of(kernel, seed, apart=True)
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
