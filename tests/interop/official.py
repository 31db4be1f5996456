"""Run .pte programs in the official ExecuTorch runtime, in a process of its own.

The runtime aborts or dies on some inputs, and its Python binding keeps global state, so it never
runs in the process of the tests. A worker process (this file, run as a script) takes one ``Case``
after the other, keeps its imports between them, and is started again after a crash or a timeout.

    from tests.interop import official

    pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)

    def test_add() -> None:
        outcome = official.run(pte_bytes, [official.Call((torch.ones(2),))])
        assert isinstance(outcome, official.Ran), outcome
        assert torch.equal(outcome.outputs[0][0], torch.full((2,), 2.0))

Calls of one case share one loaded program, so that mutable state lives from call to call.
``run_many`` yields one outcome a case and survives crashes, which is what a fuzzer wants.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import pickle
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lowerdeck.serializer import verify_pte

_BINDINGS = ("_portable_lib", "_C")  # 1.4.1 and before; 1.5 and later
_PACKAGE = "executorch.extension.pybindings"
_MARK = "lowerdeck-official"
# The types for which torch's pickling has a storage class; others travel as bytes.
_PICKLED = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
    *(torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4),
}
REASON = "the official runtime (executorch, installed with --no-deps) is not installed"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a method: flat inputs as the program numbers them."""

    inputs: Sequence[Any] = ()
    method: str = "forward"


@dataclass(frozen=True, slots=True)
class Case:
    """A program and the calls to make on it, in order, on one loaded instance.

    Attributes:
        program: The bytes of the .pte, or its path (then the runtime maps the file).
        calls: The calls; none means that the program is loaded and its methods listed only.
        data: The bytes or path of the .ptd, of the same kind as ``program``.
        verify: Run the runtime's InternalConsistency verification before loading.
        shared_arenas: Load through the Program API, where all methods share their arenas; it takes
            no ``data``.
    """

    program: bytes | Path
    calls: Sequence[Call] = ()
    data: bytes | Path | None = None
    verify: bool = True
    shared_arenas: bool = False


@dataclass(frozen=True, slots=True)
class Ran:
    """Every call succeeded: ``outputs[i]`` are the flat outputs of call i."""

    outputs: list[list[Any]]
    methods: list[str]
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoadError:
    """The program was refused before any method was loaded; ``code`` is the runtime's, if told."""

    message: str
    code: int | None = None
    log: str = ""


@dataclass(frozen=True, slots=True)
class MethodError:
    """Call number ``call`` failed: in loading its method, in setting its inputs, or in running."""

    call: int
    message: str
    code: int | None = None
    log: str = ""


@dataclass(frozen=True, slots=True)
class Crash:
    """The process of the runtime died: by ``signal`` (``"SIGSEGV"``), or with exit ``status``."""

    signal: str | None
    status: int
    log: str = ""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """Nothing came back in ``seconds``; the process was killed."""

    seconds: float
    log: str = ""


Outcome = Ran | LoadError | MethodError | Crash | TimedOut


def binding_name() -> str | None:
    """Return the full name of the installed binding, or None when executorch is not installed."""
    for name in _BINDINGS:
        try:
            if importlib.util.find_spec(f"{_PACKAGE}.{name}") is not None:
                return f"{_PACKAGE}.{name}"
        except ModuleNotFoundError:
            return None
    return None


def available() -> bool:
    """Return whether the official runtime can be imported by this interpreter."""
    return binding_name() is not None


class OfficialRuntime:
    """A worker process that runs cases, started at the first one and again after each crash.

    Args:
        python: The interpreter whose executorch is used; this one by default.
        threads: Threads that the worker may use.
    """

    def __init__(self, python: str = sys.executable, threads: int = 1) -> None:
        self._python = python
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._log: BinaryIO | None = None
        self.restarts = 0

    def __enter__(self) -> OfficialRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, case: Case, *, timeout: float = 120.0) -> Outcome:
        """Return what the official runtime makes of ``case`` within ``timeout`` seconds."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        log_start = self._log_size()
        try:
            _send(process.stdin, case)
            reply = _receive(process.stdout, time.monotonic() + timeout)
        except TimeoutError:
            process.kill()
            self._stop(process)
            return TimedOut(timeout, self._log_text(log_start))
        except (EOFError, BrokenPipeError):
            status = process.wait()
            self.restarts += 1
            self._stop(process)
            return Crash(_signal_name(status), status, self._log_text(log_start))
        if isinstance(reply, LoadError):
            return LoadError(reply.message, reply.code, self._log_text(log_start))
        if isinstance(reply, MethodError):
            return MethodError(reply.call, reply.message, reply.code, self._log_text(log_start))
        assert isinstance(reply, Ran), reply
        return reply

    def run_many(self, cases: Iterable[Case], *, timeout: float = 120.0) -> Iterator[Outcome]:
        """Yield one outcome per case, in order; ``timeout`` counts for each case."""
        for case in cases:
            yield self.run(case, timeout=timeout)

    def close(self) -> None:
        """End the worker process, if there is one; a later ``run`` starts another."""
        if self._process is not None:
            self._stop(self._process)
        if self._log is not None:
            self._log.close()
            self._log = None

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.wait()
        self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            if self._log is None:
                self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the object
            threads = str(self._threads)
            self._process = subprocess.Popen(
                [self._python, str(Path(__file__).resolve()), "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                bufsize=0,
                env={
                    **os.environ,
                    **_openvino_library(),
                    "OMP_NUM_THREADS": threads,
                    "MKL_NUM_THREADS": threads,
                },
            )
        return self._process

    def _log_size(self) -> int:
        return os.fstat(self._log.fileno()).st_size if self._log is not None else 0

    def _log_text(self, start: int, limit: int = 8000) -> str:
        if self._log is None:
            return ""
        size = self._log_size()
        # pread leaves the offset alone, which the worker shares.
        text = os.pread(self._log.fileno(), limit, max(start, size - limit))
        return text.decode(errors="replace")


_shared: list[OfficialRuntime] = []


def shared() -> OfficialRuntime:
    """Return the worker that all tests of this process share; it is ended at exit."""
    if not _shared:
        _shared.append(OfficialRuntime())
        atexit.register(_shared[0].close)
    return _shared[0]


def run(
    program: bytes | Path,
    calls: Sequence[Call] = (),
    *,
    data: bytes | Path | None = None,
    verify: bool = True,
    shared_arenas: bool = False,
    refusable: bool = False,
    timeout: float = 120.0,
) -> Outcome:
    """Return what the official runtime makes of ``program`` and ``calls`` (shared worker).

    What runs there must be right for our verifier too, unless it is ``refusable``.
    """
    outcome = shared().run(Case(program, calls, data, verify, shared_arenas), timeout=timeout)
    if isinstance(outcome, Ran) and not refusable:
        verify_pte(program.read_bytes() if isinstance(program, Path) else program)
    return outcome


def run_many(cases: Iterable[Case], *, timeout: float = 120.0) -> Iterator[Outcome]:
    """Yield one outcome per case from the shared worker, which is restarted after a crash."""
    return shared().run_many(cases, timeout=timeout)


def assert_outputs_close(
    got: Sequence[Any], expected: Sequence[Any], *, atol: float = 1e-5, rtol: float = 1e-5
) -> None:
    """Raise AssertionError unless the flat outputs agree; all but tensors and floats exactly."""
    assert len(got) == len(expected), f"{len(got)} outputs, expected {len(expected)}"
    for one, other in zip(got, expected, strict=True):
        if isinstance(other, (torch.Tensor, float)):
            torch.testing.assert_close(one, other, atol=atol, rtol=rtol)
        else:
            assert one == other, f"{one!r}, expected {other!r}"


def _openvino_library() -> dict[str, str]:
    """Return where OpenVINO's library lies, which executorch's own module looks for, too."""
    found = importlib.util.find_spec("openvino")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    libraries = [path for one in folders for path in Path(one).glob("libs/libopenvino_c.so*")]
    return {"OPENVINO_LIB_PATH": str(libraries[0])} if libraries else {}


def _signal_name(status: int) -> str | None:
    return signal.Signals(-status).name if status < 0 else None


def _plain(value: Any) -> Any:
    """Return ``value`` without classes of this module: its name differs between processes."""
    if isinstance(value, (Case, Call, Ran, LoadError, MethodError)):
        values = [_plain(getattr(value, item.name)) for item in fields(value)]
        return (_MARK, type(value).__name__, values)
    if isinstance(value, torch.Tensor) and value.dtype not in _PICKLED:
        values = [str(value.dtype), list(value.shape), value.flatten().view(torch.uint8)]
        return (_MARK, "_tensor", values)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _tensor(dtype: str, sizes: list[int], data: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose bytes ``_plain`` took."""
    return data.view(getattr(torch, dtype.removeprefix("torch."))).reshape(sizes)


def _revived(value: Any) -> Any:
    """Return the value that ``_plain`` took apart."""
    if isinstance(value, tuple) and len(value) == 3 and value[0] == _MARK:
        return globals()[value[1]](*map(_revived, value[2]))
    return [_revived(item) for item in value] if isinstance(value, list) else value


def _send(pipe: Any, message: object) -> None:
    payload = pickle.dumps(_plain(message), protocol=pickle.HIGHEST_PROTOCOL)
    message_bytes = memoryview(struct.pack("<Q", len(payload)) + payload)
    while message_bytes:
        message_bytes = message_bytes[os.write(pipe.fileno(), message_bytes) :]


def _receive(pipe: Any, deadline: float | None = None) -> object:
    (length,) = struct.unpack("<Q", _read(pipe, 8, deadline))
    return _revived(pickle.loads(_read(pipe, length, deadline)))


def _read(pipe: Any, count: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        if deadline is not None:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], left)[0]:
                raise TimeoutError
        # os.read: what a buffered reader holds back is invisible to select.
        part = os.read(pipe.fileno(), min(1 << 20, count - len(parts)))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _error_code(message: str) -> int | None:
    found = re.search(r"0x([0-9a-fA-F]+)", message) or re.search(r"error:?\s*(\d+)", message)
    if found is None:
        return None
    return int(found[1], 16 if "0x" in found[0] else 10)


def _run_here(lib: Any, case: Case) -> Outcome:
    """Return the outcome of ``case`` in this process."""
    try:
        methods, execute = _load(lib, case)
    except Exception as error:
        return LoadError(f"{type(error).__name__}: {error}", _error_code(str(error)))
    outputs, seconds = [], []
    for number, call in enumerate(case.calls):
        start = time.perf_counter()
        try:
            outputs.append(list(execute(call)))
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            return MethodError(number, message, _error_code(str(error)))
        seconds.append(time.perf_counter() - start)
    return Ran(outputs, methods, seconds)


def _load(lib: Any, case: Case) -> tuple[list[str], Any]:
    """Return the method names and a function that makes one call."""
    level = lib.Verification.InternalConsistency if case.verify else lib.Verification.Minimal
    from_path = isinstance(case.program, Path)
    program_argument = str(case.program) if from_path else case.program
    program: Any = None
    if case.verify or case.shared_arenas:
        # The Module API ignores the level that it is given; only the Program API verifies.
        load = lib._load_program if from_path else lib._load_program_from_buffer
        program = load(program_argument, program_verification=level)
    if case.shared_arenas:
        if case.data is not None:
            raise ValueError("the Program API of the binding takes no .ptd")
        loaded: dict[str, Any] = {}

        def call_program(call: Call) -> Any:
            if call.method not in loaded:
                loaded[call.method] = program.load_method(call.method)
            return loaded[call.method].call(tuple(call.inputs))

        return [program.get_method_name(i) for i in range(program.num_methods())], call_program
    if isinstance(case.data, Path) != from_path and case.data is not None:
        raise ValueError("program and data must both be paths or both be bytes")
    if from_path:
        path = str(case.data) if case.data is not None else None
        module = lib._load_for_executorch(program_argument, path)
    else:
        module = lib._load_for_executorch_from_buffer(program_argument, case.data)

    def call_module(call: Call) -> Any:
        return module.run_method(call.method, tuple(call.inputs))

    return list(module.method_names()), call_module


def _work() -> None:
    """Serve cases from stdin until it closes; replies go to what was stdout at the start."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the runtime prints belongs to the log
    name = binding_name()
    if name is None:
        raise SystemExit(REASON)
    lib = importlib.import_module(name)
    while True:
        try:
            case = _receive(sys.stdin.buffer)
        except EOFError:
            return
        _send(replies, _run_here(lib, case))  # type: ignore[arg-type]


if __name__ == "__main__":
    _work()
