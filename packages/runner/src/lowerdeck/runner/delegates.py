"""Delegates: the runtime half of a backend, how it is found, and how its calls are bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

import torch

from lowerdeck.runner.errors import ExecutionError, ProgramError
from lowerdeck.runner.frame import Frame
from lowerdeck.runner.tensors import TensorSpec
from lowerdeck.runner.view_ops import resize
from lowerdeck.serializer import CompileSpec
from lowerdeck.serializer import Tensor as TensorValue

RUNTIMES = "lowerdeck.runtimes"
"""The entry-point group in which runtime halves are registered under their backend id."""


class BackendRuntime(Protocol):
    """The half of a backend that runs what its other half compiled.

    A class registered in the entry-point group ``lowerdeck.runtimes`` is made without arguments.
    """

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[CompileSpec],
        named_data: Mapping[str, memoryview],
    ) -> Any:
        """Return a handle for one delegate of a program.

        Args:
            blob: The bytes that the backend's ``preprocess`` made; do not trust them.
            compile_specs: The settings stored with them.
            named_data: The program's blobs by key.
        """
        ...

    def execute(self, handle: Any, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the outputs of one call.

        Args:
            handle: What ``init`` returned.
            inputs: The inputs; they are the program's memory: do not write or keep them.
        """
        ...


@runtime_checkable
class CountsInputs(Protocol):
    """A runtime that tells how many of the values of a call are inputs.

    A file lists the inputs and outputs of a call in one row. Without this method the runner takes
    as outputs the values at the end that nothing has written before the call on every way to it.
    """

    def input_count(self, handle: Any) -> int:
        """Return how many inputs the delegate ``handle`` takes."""
        ...


def installed_runtimes() -> dict[str, str]:
    """Return the backend ids that have a registered runtime half, with where it is defined."""
    return {entry.name: entry.value for entry in entry_points(group=RUNTIMES)}


def find_runtime(
    backend_id: str, given: Mapping[str, BackendRuntime], method: str
) -> BackendRuntime:
    """Return the runtime half of a backend.

    Args:
        backend_id: The id that the file names.
        given: Runtimes that the caller gave; they come first.
        method: The method that needs it, for the message.

    Raises:
        ProgramError: There is none, or it cannot be imported or made.
    """
    if backend_id in given:
        return given[backend_id]
    for entry in entry_points(group=RUNTIMES, name=backend_id):
        try:
            runtime: BackendRuntime = entry.load()()
        except Exception as error:
            raise ProgramError(
                f"the runtime half of backend {backend_id!r} ({entry.value}) cannot be made: "
                f"{type(error).__name__}: {error}",
                method=method,
            ) from error
        return runtime
    known = sorted({*given, *installed_runtimes()})
    raise ProgramError(
        f"the program needs the backend {backend_id!r}, which has no runtime half here (known: "
        f"{', '.join(known) or 'none'}); give load(..., backends={{{backend_id!r}: runtime}}) or "
        f"install a package that registers it under {RUNTIMES!r}",
        method=method,
    )


class Delegate:
    """One delegate of a method, initialised.

    Args:
        backend_id: Id of its backend.
        runtime: The runtime half.
        blob: Its bytes.
        compile_specs: Its settings.
        named_data: The program's blobs by key.
        method: The method it belongs to, for messages.

    Raises:
        ProgramError: The runtime half refuses the blob.
    """

    def __init__(
        self,
        backend_id: str,
        runtime: BackendRuntime,
        blob: memoryview,
        compile_specs: Sequence[CompileSpec],
        named_data: Mapping[str, memoryview],
        *,
        method: str,
    ) -> None:
        self.backend_id = backend_id
        self.runtime = runtime
        try:
            self.handle = runtime.init(blob, compile_specs, named_data)
        except Exception as error:
            raise ProgramError(
                f"backend {backend_id!r} refuses its delegate: {type(error).__name__}: {error}",
                method=method,
            ) from error

    def bind(
        self, args: Sequence[int], frame: Frame, written: frozenset[int]
    ) -> Callable[[], None]:
        """Return a function that calls this delegate.

        Args:
            args: Value indices of the inputs, then of the outputs.
            frame: The values of the method.
            written: The values that hold something on every way to this call.

        Raises:
            ProgramError: An output is not writable, or is no tensor.
        """
        count = self._input_count(args, written)
        inputs, outputs = list(args[:count]), list(args[count:])
        results = [frame.tensor(index, "an output of a delegate") for index in outputs]
        for index in outputs:
            frame.require_writable(index, "an output of a delegate")
        execute, handle = self.runtime.execute, self.handle
        if any(frame.is_moving(index) for index in args):
            fetch_inputs = [frame.fetcher(index) for index in inputs]
            fetch_outputs = [frame.fetcher(index) for index in outputs]
            specs = {
                id(tensor): spec for tensor, spec in zip(frame.registers, frame.specs, strict=True)
            }

            def moving_step() -> None:
                produced = execute(handle, [fetch() for fetch in fetch_inputs])  # type: ignore[misc]
                targets: list[Any] = [fetch() for fetch in fetch_outputs]
                self._store(produced, [(target, specs[id(target)]) for target in targets])

            return moving_step
        values: list[Any] = [frame.registers[index] for index in inputs]
        return lambda: self._store(execute(handle, values), results)

    def _input_count(self, args: Sequence[int], written: frozenset[int]) -> int:
        if isinstance(self.runtime, CountsInputs):
            count = self.runtime.input_count(self.handle)
            if not 0 <= count <= len(args):
                raise ProgramError(
                    f"backend {self.backend_id!r} says that its delegate takes {count} inputs; "
                    f"the call has {len(args)} values"
                )
            return count
        count = len(args)
        while count and args[count - 1] not in written:
            count -= 1
        return count

    def _store(self, produced: Sequence[Any], results: Sequence[tuple[torch.Tensor, Any]]) -> None:
        if len(produced) != len(results):
            raise ExecutionError(
                f"backend {self.backend_id!r} returned {len(produced)} outputs; the program "
                f"expects {len(results)}"
            )
        for value, (out, spec) in zip(produced, results, strict=True):
            store(value, out, spec, self.backend_id)


def store(value: object, out: torch.Tensor, spec: TensorSpec, backend_id: str) -> None:
    """Copy what a backend returned into the memory of the program.

    Args:
        value: The returned value.
        out: The tensor of the program.
        spec: What the file says of it.
        backend_id: Id of the backend, for messages.

    Raises:
        ExecutionError: It is no tensor, or of another type or shape than the file says.
    """
    if not isinstance(value, torch.Tensor):
        raise ExecutionError(
            f"backend {backend_id!r} returned a {type(value).__name__}, no tensor"
        )
    if value.dtype != out.dtype:
        raise ExecutionError(
            f"backend {backend_id!r} returned {value.dtype} for value {spec.index}; the program "
            f"says {out.dtype}"
        )
    if value.shape != out.shape:
        resize(out, value.shape, spec)
    out.copy_(value)


def is_given(value: object) -> bool:
    """Return whether a value of the file holds something before any instruction runs."""
    if not isinstance(value, TensorValue):
        return True
    extra = value.extra_tensor_info
    named = extra is not None and bool(extra.fully_qualified_name)
    return value.data_buffer_idx > 0 or named
