"""What a fork of a test process says before it ends, or before its time is over."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def _read_until(reader: int, deadline: float) -> tuple[bytes, bool]:
    """Return what was written into a pipe, and whether its last writer has ended.

    Args:
        reader: The descriptor of the pipe's end for reading.
        deadline: When to stop, on the clock of ``time.monotonic``.
    """
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([reader], [], [], left)[0]:
            break
        part = os.read(reader, 1 << 16)
        if not part:
            return data, True
        data += part
    return data, False


def run_in_fork(
    work: Callable[[], Iterable[Mapping[str, Any]]], seconds: int, waits: int
) -> tuple[list[dict[str, Any]], str]:
    """Return what ``work`` yields in a fork of this process, and how the fork failed, or "".

    Args:
        work: What to do there; what it prints is dropped.
        seconds: CPU time after which the fork ends: a busy machine is no reason to end it.
        waits: How many times as long it may take on the clock, should it sleep and not compute.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        # os._exit: past Python's own end, which would run what the parent registered; and whatever
        # is raised, as a fork that came back would go on as a second test process.
        try:
            os.close(reader)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(nowhere, stream)
            with os.fdopen(writer, "w") as out:
                for found in work():
                    print(json.dumps(found), file=out, flush=True)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    data, ended = _read_until(reader, time.monotonic() + waits * seconds)
    os.close(reader)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    late = not ended or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU)
    failed = f"no end in {seconds} s" if late else f"signal or status {status}" if status else ""
    return [json.loads(line) for line in data.decode().splitlines()], failed
