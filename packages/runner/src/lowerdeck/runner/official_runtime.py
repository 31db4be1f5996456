"""Run the official ExecuTorch runtime in a separate process, because some files abort it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch

from lowerdeck.runner.binding import official_binding, official_binding_name
from lowerdeck.runner.errors import OfficialRuntimeError
from lowerdeck.serializer import open_pte

_MAX_LOG_LINE = 1000
_PROGRAM = f"from {__name__} import serve; serve()"
_LIBRARIES = (
    "extension/llm/custom_ops/libcustom_ops_aot_lib.so",
    "kernels/quantized/libquantized_ops_aot_lib.so",
)
"""Kernel libraries in ExecuTorch's wheel that must be loaded explicitly."""


@dataclass(frozen=True, slots=True)
class OfficialCalls:
    """Results and times of calls in the official runtime.

    Attributes:
        outputs: Flat outputs of the last call.
        seconds: Wall-clock time of each call.
    """

    outputs: list[Any]
    seconds: list[float]


class OfficialRuntime:
    """The official runtime in a process, started lazily and again after a crash.

    An instance is not thread-safe.

    Example:
        >>> from lowerdeck.runner import OfficialRuntime
        >>> with OfficialRuntime() as runtime:  # doctest: +SKIP
        ...     runtime.load("model.pte")
        ...     outputs = runtime.run([torch.ones(2)]).outputs
    """

    def __init__(self, *, extra_kernels: bool = False, patience: float = 600.0) -> None:
        """Configure the runtime without starting it.

        Args:
            extra_kernels: Whether to load the wheel's kernels for language models and quantized
                programs, in addition to the portable ones.
            patience: Timeout of a request, in seconds.
        """
        self._extra_kernels = extra_kernels
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._file = "to start"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)

    def __enter__(self) -> Self:
        """Return the runtime."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._log.close()

    @property
    def name(self) -> str:
        """Name and version of the runtime, for messages."""
        return f"the official ExecuTorch runtime ({version('executorch')})"

    def backends(self) -> list[str]:
        """Return the ids of the runtime's backends.

        Raises:
            OfficialRuntimeError: The runtime is not installed, or crashes.
        """
        return list(self._request("backends"))

    def load(
        self,
        path: str | os.PathLike[str],
        data: str | os.PathLike[str] | None = None,
        *,
        methods: Sequence[str] = (),
    ) -> None:
        """Load a file, and unload the previous one.

        Args:
            data: The ``.ptd`` file of the program.
            methods: Methods that share state, as in a C++ application; then ``data`` is not
                supported. By default each method has separate state.

        Raises:
            OfficialRuntimeError: The runtime is not installed, rejects the file, crashes, or does
                not respond within ``patience``.
        """
        self._file = os.fspath(path)
        files = [os.fspath(Path(file).absolute()) for file in (path, data) if file is not None]
        self._request("load", files, list(methods))

    def run(
        self, inputs: Sequence[Any], method: str = "forward", *, repeat: int = 1
    ) -> OfficialCalls:
        """Return the results of calls of a method of the loaded file.

        Raises:
            OfficialRuntimeError: The runtime rejects the call, crashes, or does not respond within
                ``patience``.
        """
        return OfficialCalls(*self._request("run", method, list(inputs), repeat))

    def _request(self, request: str, *args: Any) -> Any:
        if self._process is None:
            if official_binding_name() is None:
                raise OfficialRuntimeError(
                    "the official runtime is not installed: pip install --no-deps executorch"
                )
            self._log.seek(0)
            self._log.truncate()
            self._process = subprocess.Popen(
                # -P: like the `lowerdeck` script, do not import from the current folder.
                [sys.executable, "-P", "-c", _PROGRAM, str(int(self._extra_kernels))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Not a pipe: with 64 KB of unread log, the runtime would block.
                stderr=self._log,
            )
        process, is_late = self._process, threading.Event()

        def give_up() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(self._patience, give_up)
        timer.start()
        try:
            _send((request, args), process.stdin)
            answer, failure = _receive(process.stdout)
        except (EOFError, OSError):
            answer, failure = None, self._end(process)
        except BaseException:
            # Interrupted: the answer is still in the pipe.
            process.kill()
            self._process = None
            raise
        finally:
            timer.cancel()
        if is_late.is_set():
            failure = f"no response within {self._patience:.0f} s"
        if failure is not None:
            raise OfficialRuntimeError(f"the official runtime failed on {self._file}: {failure}")
        return answer

    def _end(self, process: subprocess.Popen[bytes]) -> str:
        """Return the reason why the process ended."""
        self._process = None
        process.communicate()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        if process.returncode > 0 and lines:
            return lines[-1][-_MAX_LOG_LINE:]
        return f"its process ended with {process.returncode}"


def serve() -> None:
    """Respond to requests on standard input until it ends; runs in the runtime's process."""
    # The runtime prints to standard output; answers use a copy of the descriptor.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    server = _Server(official_binding(), extra_kernels=sys.argv[1] == "1")
    while True:
        try:
            request, args = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer, failure = getattr(server, request)(*args), None
        except Exception as error:
            answer, failure = None, f"{type(error).__name__}: {error}{server.unregistered()}"
        _send((answer, failure), answers)


class _Server:
    """Request handlers in the process of the runtime."""

    def __init__(self, binding: dict[str, Any], *, extra_kernels: bool) -> None:
        self._binding = binding
        self._methods: dict[str, Any] = {}
        self._module: Any = None
        self._file = ""
        root = Path(binding["__file__"]).parents[2]
        for library in _LIBRARIES if extra_kernels else ():
            if (root / library).is_file():
                load: Any = torch.ops.load_library
                load(str(root / library))

    def backends(self) -> list[str]:
        return list(self._binding["_get_registered_backend_names"]())

    def load(self, files: list[str], methods: list[str]) -> None:
        self._module, self._methods, self._file = None, {}, files[0]
        if methods:
            program = self._binding["_load_program"](*files)
            self._methods = {name: program.load_method(name) for name in methods}
        else:
            self._module = self._binding["_load_for_executorch"](*files)

    def unregistered(self) -> str:
        """Return an error suffix that names the backends that are not registered, or ""."""
        backends = self.backends()
        missing: set[str] = set()
        with suppress(Exception), open_pte(self._file) as file:
            missing = {delegate.id for delegate in file.delegates} - set(backends)
        if not missing:
            return ""
        names = ", ".join(map(repr, sorted(missing)))
        return (
            f"; backend {names} is not registered in this runtime, which has: "
            f"{', '.join(backends) or 'none'}"
        )

    def run(self, method: str, inputs: list[Any], repeat: int) -> tuple[list[Any], list[float]]:
        outputs, seconds = [], []
        for _ in range(repeat):
            start = time.perf_counter()
            if self._module is None:
                outputs = self._methods[method].call(inputs)
            else:
                outputs = self._module.run_method(method, inputs)
            seconds.append(time.perf_counter() - start)
        # Outputs alias the runtime's memory, which the next call overwrites.
        cloned = [out.clone() if isinstance(out, torch.Tensor) else out for out in outputs]
        return cloned, seconds


def _send(message: Any, stream: Any) -> None:
    """Write a message of tensors and plain data, preceded by its size."""
    content = io.BytesIO()
    torch.save(message, content)
    stream.write(len(content.getbuffer()).to_bytes(8, "little"))
    stream.write(content.getbuffer())
    stream.flush()


def _receive(stream: Any) -> Any:
    """Return the next message; raise ``EOFError`` if it is incomplete."""
    size = int.from_bytes(stream.read(8), "little")
    content = stream.read(size)
    if not size or len(content) < size:
        raise EOFError
    return torch.load(io.BytesIO(content), weights_only=True)
