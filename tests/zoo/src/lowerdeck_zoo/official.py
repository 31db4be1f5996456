"""Run .pte programs in the official ExecuTorch runtime, in a separate process.

The runtime aborts on some inputs, and its Python binding keeps global state, so it never runs in
the process of the tests. A worker process (this file, run as a script) takes one ``Case`` after
the other, keeps its imports between them, and is started again after a crash or a timeout.

    from lowerdeck_zoo import official

    pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)

    def test_add() -> None:
        outcome = official.run(pte_bytes, [official.Call((torch.ones(2),))])
        assert isinstance(outcome, official.Ran), outcome
        assert torch.equal(outcome.outputs[0][0], torch.full((2,), 2.0))

Calls of one case share one loaded program, so that mutable state persists from call to call.
``run_many`` yields one outcome per case and survives crashes.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

import torch

_BINDINGS = ("_C", "_portable_lib")  # 1.5 and later; 1.4.1 and before
_PACKAGE = "executorch.extension.pybindings"
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
    """Every call succeeded.

    Attributes:
        outputs: The flat outputs of each call.
        methods: The names of all methods.
        seconds: The wall-clock time of each call.
        inputs: The flat inputs of each call, after all calls: a program may write them.
    """

    outputs: list[list[Any]]
    methods: list[str]
    seconds: list[float] = field(default_factory=list)
    inputs: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoadError:
    """The program was refused before any method was loaded; ``code`` is the runtime's, if any."""

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
        self._threads = str(threads)
        self._worker: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._log: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the object
        self.restarts = 0

    def __enter__(self) -> OfficialRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, case: Case, *, timeout: float = 120.0) -> Outcome:
        """Return what the official runtime makes of ``case`` within ``timeout`` seconds."""
        process, connection = self._start()
        log_start = self._log_size()
        try:
            _send(connection, _message(case))
            if not connection.poll(timeout):
                process.kill()
                self._stop()
                return TimedOut(timeout, self._log_text(log_start))
            reply = _receive(connection)
        except (EOFError, ConnectionError):
            status = process.wait()
            self.restarts += 1
            self._stop()
            name = signal.Signals(-status).name if status < 0 else None
            return Crash(name, status, self._log_text(log_start))
        return _outcome(reply, self._log_text(log_start))

    def run_many(self, cases: Iterable[Case], *, timeout: float = 120.0) -> Iterator[Outcome]:
        """Yield one outcome per case, in order; ``timeout`` counts for each case."""
        return (self.run(case, timeout=timeout) for case in cases)

    def close(self) -> None:
        """End the worker process."""
        if self._worker is not None:
            self._stop()
        self._log.close()

    def _stop(self) -> None:
        assert self._worker is not None
        process, connection = self._worker
        connection.close()
        process.wait()
        self._worker = None

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        if self._worker is None:
            ours, theirs = Pipe()
            threads = {"OMP_NUM_THREADS": self._threads, "MKL_NUM_THREADS": self._threads}
            process = subprocess.Popen(
                [self._python, str(Path(__file__).resolve()), str(theirs.fileno())],
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_openvino_library(), **threads},
            )
            theirs.close()
            self._worker = process, ours
        return self._worker

    def _log_size(self) -> int:
        return os.fstat(self._log.fileno()).st_size

    def _log_text(self, start: int, limit: int = 8000) -> str:
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
    # Here: the zoo itself depends on torch alone.
    from lowerdeck.serializer import verify_pte

    outcome = shared().run(Case(program, calls, data, verify, shared_arenas), timeout=timeout)
    if isinstance(outcome, Ran) and not refusable:
        verify_pte(program.read_bytes() if isinstance(program, Path) else program)
    return outcome


def outputs(program: bytes | Path, calls: Sequence[Any], **options: Any) -> list[list[Any]]:
    """Return the outputs of calls, or of tuples of arguments, each of which must run."""
    made = [call if isinstance(call, Call) else Call(call) for call in calls]
    outcome = run(program, made, **options)
    assert isinstance(outcome, Ran), outcome
    return outcome.outputs


def run_many(cases: Iterable[Case], *, timeout: float = 120.0) -> Iterator[Outcome]:
    """Yield one outcome per case from the shared worker, which is restarted after a crash."""
    return shared().run_many(cases, timeout=timeout)


def _openvino_library() -> dict[str, str]:
    """Return the path of OpenVINO's library, for which executorch's module looks as well."""
    found = importlib.util.find_spec("openvino")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    libraries = [path for one in folders for path in Path(one).glob("libs/libopenvino_c.so*")]
    return {"OPENVINO_LIB_PATH": str(libraries[0])} if libraries else {}


def run_here(lib: Any, case: Case) -> Outcome:
    """Return the outcome of ``case`` in this process, for callers that fork themselves.

    Args:
        lib: The binding.
        case: The case.
    """
    return _outcome(_run(lib, *_message(case)))


# Between processes go no classes of this module: the worker knows them by another name.
def _message(case: Case) -> tuple[Any, ...]:
    calls = [(list(call.inputs), call.method) for call in case.calls]
    return case.program, calls, case.data, case.verify, case.shared_arenas


def _outcome(reply: tuple[Any, ...], log: str = "") -> Outcome:
    kind, *values = reply
    if kind == "ran":
        return Ran(*values)
    error = LoadError(*values) if kind == "load" else MethodError(*values)
    return replace(error, log=log)


def _send(connection: Connection, message: object) -> None:
    # torch.save: plain pickling knows no tensors of uint16, uint32, uint64 and float8.
    buffer = io.BytesIO()
    torch.save(message, buffer)
    connection.send_bytes(buffer.getbuffer())


def _receive(connection: Connection) -> Any:
    return torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)


def _error_code(message: str) -> int | None:
    found = re.search(r"0x([0-9a-fA-F]+)", message) or re.search(r"error:?\s*(\d+)", message)
    if found is None:
        return None
    return int(found[1], 16 if "0x" in found[0] else 10)


def _run(
    lib: Any, program: bytes | Path, calls: Any, data: Any, verify: bool, shared_arenas: bool
) -> tuple[Any, ...]:
    """Return the kind of outcome of a case in this process, and the arguments of its class."""
    try:
        methods, execute = _load(lib, program, data, verify, shared_arenas)
    except Exception as error:
        return "load", f"{type(error).__name__}: {error}", _error_code(str(error))
    outputs, seconds = [], []
    for number, (inputs, method) in enumerate(calls):
        start = time.perf_counter()
        try:
            outputs.append(list(execute(method, tuple(inputs))))
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            return "method", number, message, _error_code(str(error))
        seconds.append(time.perf_counter() - start)
    return "ran", outputs, methods, seconds, [inputs for inputs, _ in calls]


def _load(
    lib: Any, program: bytes | Path, data: Any, verify: bool, shared_arenas: bool
) -> tuple[list[str], Callable[[str, tuple[Any, ...]], Any]]:
    """Return the method names and a function that makes one call."""
    level = lib.Verification.InternalConsistency if verify else lib.Verification.Minimal
    from_path = isinstance(program, Path)
    source = str(program) if from_path else program
    loaded: Any = None
    if verify or shared_arenas:
        # The Module API ignores the level that it is given; only the Program API verifies.
        load = lib._load_program if from_path else lib._load_program_from_buffer
        loaded = load(source, program_verification=level)
    if shared_arenas:
        if data is not None:
            raise ValueError("the Program API of the binding takes no .ptd")
        names = [loaded.get_method_name(i) for i in range(loaded.num_methods())]
        # Loading a method sets the initial values of its state: all are loaded before any call.
        methods = {name: loaded.load_method(name) for name in names}
        return names, lambda name, inputs: methods[name].call(inputs)
    if data is not None and isinstance(data, Path) != from_path:
        raise ValueError("program and data must both be paths or both be bytes")
    if from_path:
        module = lib._load_for_executorch(source, None if data is None else str(data))
    else:
        module = lib._load_for_executorch_from_buffer(source, data)
    return list(module.method_names()), module.run_method


def _serve(connection: Connection) -> None:
    """Serve cases until the other end closes."""
    name = binding_name()
    if name is None:
        raise SystemExit(REASON)
    lib = importlib.import_module(name)
    while True:
        try:
            case = _receive(connection)
        except EOFError:
            return
        _send(connection, _run(lib, *case))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
