"""Find the runtime of a backend, and bind delegate calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from lowerdeck.inspect import installed_entries
from lowerdeck.runner.errors import ExecutionError, ProgramError
from lowerdeck.runner.operators.view_ops import resize
from lowerdeck.runner.values.frame import Frame
from lowerdeck.runner.values.tensors import TensorSpec
from lowerdeck.serializer import CompileSpec

RUNTIMES = "lowerdeck.runtimes"
"""Entry-point group that registers runtimes by backend id."""
_REQUIRED_METHODS = ("init", "input_count", "execute")


@runtime_checkable
class BackendRuntime(Protocol):
    """Protocol of a backend's runtime.

    Classes in the entry-point group ``lowerdeck.runtimes`` are instantiated without arguments.
    """

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[CompileSpec],
        named_data: Mapping[str, memoryview],
    ) -> Any:
        """Return a handle for one delegate of a program.

        Args:
            blob: The untrusted payload.
            compile_specs: The compile specs in the file.
            named_data: The program's blobs by key.
        """
        ...

    def input_count(self, handle: Any) -> int:
        """Return the number of inputs of a call; the file lists inputs and outputs together."""
        ...

    def execute(self, handle: Any, inputs: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Return the outputs of one call.

        Args:
            inputs: Tensors that alias the program's memory; do not write or keep them.
        """
        ...


class Precision(Protocol):
    """Numeric precision of an event in a delegate. Logged results are dequantized."""

    @property
    def step(self) -> float | None:
        """Return the quantization step, or None for floats and dynamic scales."""
        ...

    @property
    def zero_point(self) -> int:
        """Return the quantization zero point."""
        ...

    @property
    def limits(self) -> tuple[int, int]:
        """Return the smallest and largest integer."""
        ...

    @property
    def at_run_time(self) -> bool:
        """Return whether scales are dynamic, possibly per row."""
        ...

    @property
    def relative(self) -> float:
        """Return the expected error relative to the largest value; 0 for float32."""
        ...


class DelegateLog(Protocol):
    """Callback for events inside a delegate, used for profiles."""

    def __call__(
        self,
        identifier: int | str,
        start_ns: int,
        end_ns: int,
        outputs: Sequence[torch.Tensor] = (),
        label: str = "",
        precision: Precision | None = None,
    ) -> None:
        """Record one event.

        Args:
            identifier: Debug identifier, a key of the backend's debug map.
            start_ns: ``time.perf_counter_ns()`` at the start.
            end_ns: ``time.perf_counter_ns()`` at the end.
            outputs: Results, if comparable with eager.
            label: The operator, such as ``"Conv2d"``.
            precision: Precision of the results, if below float32.
        """
        ...


@runtime_checkable
class LogsEvents(Protocol):
    """Protocol of runtimes that report the times of events in a delegate."""

    def execute_logged(
        self, handle: Any, inputs: Sequence[Any], log: DelegateLog
    ) -> Sequence[torch.Tensor]:
        """Return the outputs of one call, as ``execute`` does, and log its events.

        Args:
            log: Called once per event.
        """
        ...


def installed_runtimes() -> dict[str, str]:
    """Return the entry point of each registered runtime, by backend id."""
    return {entry.name: entry.value for entry in installed_entries(RUNTIMES)}


def find_runtime(backend_id: str, overrides: Mapping[str, BackendRuntime]) -> BackendRuntime:
    """Return the runtime of a backend.

    Args:
        overrides: The caller's runtimes by id, which take precedence.

    Raises:
        ProgramError: There is no runtime, or it cannot be imported or instantiated.
    """
    if backend_id in overrides:
        return overrides[backend_id]
    for entry in installed_entries(RUNTIMES, backend_id):
        try:
            runtime: BackendRuntime = entry.load()()
        except (Exception, SystemExit) as error:
            raise ProgramError(
                f"the runtime of backend {backend_id!r} ({entry.value}) cannot be created: "
                f"{type(error).__name__}: {error}"
            ) from error
        return runtime
    backends = ", ".join(sorted({*overrides, *installed_runtimes()})) or "none"
    raise ProgramError(
        f"the backend {backend_id!r} has no runtime here (known: {backends}); pass "
        f"load(..., backends={{{backend_id!r}: runtime}}), or install a package that registers "
        f"one under {RUNTIMES!r}"
    )


class Delegate:
    """Initialized delegate of a method.

    Args:
        named_data: The program's blobs by key.

    Raises:
        ProgramError: The runtime lacks a method, or rejects the blob.
    """

    def __init__(
        self,
        backend_id: str,
        runtime: BackendRuntime,
        blob: memoryview,
        compile_specs: Sequence[CompileSpec],
        named_data: Mapping[str, memoryview],
    ) -> None:
        self.backend_id = backend_id
        self.runtime = runtime
        if not isinstance(runtime, BackendRuntime):
            missing = [name for name in _REQUIRED_METHODS if not hasattr(runtime, name)]
            raise ProgramError(
                f"the runtime of backend {backend_id!r} ({type(runtime).__name__}) has no "
                f"{' and no '.join(missing)}: add it, see lowerdeck.runner.BackendRuntime"
            )
        try:
            self.handle: Any = runtime.init(blob, compile_specs, named_data)
        except Exception as error:
            raise ProgramError(
                f"backend {backend_id!r} rejects its delegate: {type(error).__name__}: {error}"
            ) from error

    def input_count(self, values: int) -> int:
        """Return the number of inputs of a call.

        Args:
            values: The number of inputs and outputs.

        Raises:
            ProgramError: The runtime returns a number that is negative or larger than ``values``.
        """
        count = self.runtime.input_count(self.handle)
        if not 0 <= count <= values:
            raise ProgramError(
                f"backend {self.backend_id!r} reports {count} inputs; the call has {values} values"
            )
        return count


class DelegateStep:
    """Delegate call bound to its values.

    Args:
        inputs: Indices of the input values.
        outputs: Indices of the output values.

    Raises:
        ProgramError: An output is not a tensor, or is a constant.
    """

    def __init__(
        self, delegate: Delegate, inputs: Sequence[int], outputs: Sequence[int], frame: Frame
    ) -> None:
        for index in outputs:
            frame.tensor(index, "an output of a delegate")
            frame.require_writable(index, "an output of a delegate")
        self.backend_id: str = delegate.backend_id
        self._delegate = delegate
        self._inputs = [frame.fetcher(index) for index in inputs]
        self._outputs = [frame.fetcher(index) for index in outputs]
        self._specs = frame.spec_of

    def __call__(self) -> None:
        """Run the delegate."""
        delegate = self._delegate
        inputs = [get() for get in self._inputs]
        self._store(delegate.runtime.execute(delegate.handle, inputs))

    def logged(self, log: DelegateLog) -> None:
        """Run the delegate, and log its events if its runtime reports them.

        Args:
            log: Called once per event.
        """
        delegate = self._delegate
        if not isinstance(delegate.runtime, LogsEvents):
            self()
            return
        inputs = [get() for get in self._inputs]
        self._store(delegate.runtime.execute_logged(delegate.handle, inputs, log))

    def _store(self, produced: Sequence[object]) -> None:
        name = self._delegate.backend_id
        if len(produced) != len(self._outputs):
            raise ExecutionError(
                f"backend {name!r} returned {len(produced)} outputs; the program expects "
                f"{len(self._outputs)}"
            )
        for value, get in zip(produced, self._outputs, strict=True):
            out = get()
            if not isinstance(out, torch.Tensor):
                raise ExecutionError(
                    f"the program stores an output of backend {name!r} in a {type(out).__name__}; "
                    "expected a tensor"
                )
            _store_output(value, out, self._specs[id(out)], name)


def _store_output(value: object, out: torch.Tensor, spec: TensorSpec, backend_id: str) -> None:
    """Copy a backend's result into the memory of the program."""
    if not isinstance(value, torch.Tensor):
        raise ExecutionError(
            f"backend {backend_id!r} returned a {type(value).__name__}; expected a tensor"
        )
    if value.dtype != out.dtype:
        raise ExecutionError(
            f"backend {backend_id!r} returned {value.dtype} for value {spec.index}; expected "
            f"{out.dtype}"
        )
    if value.shape != out.shape:
        resize(out, value.shape, spec)
    out.copy_(value)
