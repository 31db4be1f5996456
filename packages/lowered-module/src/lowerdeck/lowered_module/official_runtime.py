"""ExecuTorch's runtime in a separate process, because some files abort it.

Only ``serve``, which that process runs, loads ``executorch``.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from lowerdeck.inspect import official_binding
from lowerdeck.lowered_module.errors import LoweringError

_PATIENCE = 600.0
"""Seconds after which a call counts as failed."""
_SAMPLE = 0.02
"""Least seconds that a sample takes: several calls of a small model."""
_SAMPLES, _LONG = 25, 10.0
"""How many samples are taken, fewer where they take more than so many seconds."""
_PROGRAM = f"from {__name__} import serve; serve()"


class OfficialRuntime:
    """The official runtime; its process starts at the first call, and again after one that ended.

    Example:
        >>> from lowerdeck.lowered_module.official_runtime import OfficialRuntime, measure
        >>> with OfficialRuntime() as runtime:  # doctest: +SKIP
        ...     outputs, seconds = runtime.call(measure, file, inputs)
    """

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End its process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._log.close()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function of this module returns there.

        Args:
            function: A function whose first argument is the runtime's binding.
            *args: Its other arguments.

        Raises:
            LoweringError: The runtime is not installed, refuses a file or a call, or ends with it.
        """
        if self._process is None:
            self._log.seek(0)
            self._log.truncate()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
        process, is_late = self._process, threading.Event()

        def give_up() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(_PATIENCE, give_up)
        timer.start()
        try:
            _send((function.__name__, args), process.stdin)
            answer, failure = _receive(process.stdout)
        except (EOFError, OSError):
            answer, failure = None, self._end(process)
        finally:
            timer.cancel()
        if is_late.is_set():
            raise LoweringError(f"the runtime said nothing for {_PATIENCE:.0f} s")
        if failure is not None:
            raise LoweringError(f"the official runtime failed: {failure}")
        return answer

    def _end(self, process: subprocess.Popen[bytes]) -> str:
        """Return why the process ended."""
        self._process = None
        process.communicate()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        told = process.returncode > 0 and lines
        return lines[-1] if told else f"it ended with {process.returncode}"


def serve() -> None:
    """Answer the calls that come through standard input, until it ends."""
    # The runtime prints where it likes; answers go where nothing else does.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        binding = official_binding()
    except ModuleNotFoundError:
        sys.exit("executorch is not installed: pip install executorch")
    while True:
        try:
            name, args = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer, failure = globals()[name](binding, *args), None
        except Exception as error:
            answer, failure = None, f"{type(error).__name__}: {error}"
        _send((answer, failure), answers)


def _send(message: Any, stream: Any) -> None:
    """Write tensors and plain data, after their size in bytes."""
    content = io.BytesIO()
    torch.save(message, content)
    stream.write(len(content.getbuffer()).to_bytes(8, "little"))
    stream.write(content.getbuffer())
    stream.flush()


def _receive(stream: Any) -> Any:
    """Return the next message; ``EOFError`` where there is no whole one."""
    size = int.from_bytes(stream.read(8), "little")
    content = stream.read(size)
    if not size or len(content) < size:
        raise EOFError
    return torch.load(io.BytesIO(content), weights_only=True)


def backend_names(binding: dict[str, Any]) -> list[str]:
    """Return the names of the backends that the runtime has.

    Args:
        binding: The runtime.
    """
    return list(binding["_get_registered_backend_names"]())


def measure(binding: dict[str, Any], file: str, inputs: Sequence[Any]) -> tuple[list[Any], float]:
    """Return the outputs of the first call of ``forward``, and the seconds of the fastest.

    The least of many samples, since other work on the machine only makes a call slower.

    Args:
        binding: The runtime.
        file: The program.
        inputs: Flat inputs, as the program numbers them.
    """
    module = binding["_load_for_executorch"](file)
    # Outputs are in the runtime's memory, which the next call overwrites.
    outputs = [
        one.clone() if isinstance(one, torch.Tensor) else one for one in module.forward(inputs)
    ]
    begin = time.perf_counter()
    samples, count = list[float](), 1
    while len(samples) < _SAMPLES and time.perf_counter() - begin < _LONG:
        start = time.perf_counter()
        for _ in range(count):
            module.forward(inputs)
        samples.append((time.perf_counter() - start) / count)
        count = max(1, round(_SAMPLE / max(min(samples), 1e-7)))
    return outputs, min(samples)
