"""A program ready to run: its methods, made when they are first asked for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from lowerdeck.runner.arena import Arena, make_arenas
from lowerdeck.runner.delegates import BackendRuntime, Delegate, find_runtime
from lowerdeck.runner.errors import ProgramError
from lowerdeck.runner.method import LoadedMethod
from lowerdeck.runner.sources import ProgramData, as_view
from lowerdeck.serializer import DataLocation, ExecutionPlan, Program


class LoadedProgram:
    """A program whose methods can be run.

    Made by :func:`lowerdeck.runner.load`.

    Args:
        program: The program as the serializer reads it.
        external: The tensors of the ``.ptd`` by name.
        backends: Runtime halves by backend id, before the installed ones.
    """

    def __init__(
        self,
        program: Program,
        *,
        external: Mapping[str, memoryview],
        backends: Mapping[str, BackendRuntime],
    ) -> None:
        self._program = program
        self._source = ProgramData(program, external)
        self._backends = backends
        self._plans = {plan.name: plan for plan in program.execution_plan}
        self._loaded: dict[str, LoadedMethod] = {}

    @property
    def methods(self) -> list[str]:
        """Return the names of the methods, in the order of the file."""
        return list(self._plans)

    def method(self, name: str = "forward") -> LoadedMethod:
        """Return the method ``name``, made at the first call.

        Args:
            name: Name of the method.

        Raises:
            ProgramError: There is no such method, or it needs what is not here.
        """
        if name not in self._plans:
            raise ProgramError(
                f"there is no method {name!r}; the program has {', '.join(self.methods)}"
            )
        if name not in self._loaded:
            self._loaded[name] = self._load(self._plans[name])
        return self._loaded[name]

    def run(self, name: str, *inputs: Any, **kwargs: Any) -> Any:
        """Return the result of one call of the method ``name``, in its original structure.

        Args:
            name: Name of the method.
            *inputs: The inputs by position, flat or as the original function took them.
            **kwargs: The inputs that the original function took by name.

        Raises:
            ProgramError: There is no such method, or it cannot be loaded.
            InputError: The inputs do not fit; nothing has run.
            ExecutionError: An instruction failed.
        """
        return self.method(name)(*inputs, **kwargs)

    def _load(self, plan: ExecutionPlan) -> LoadedMethod:
        try:
            with warnings.catch_warnings():
                # Constants are the file itself, mapped read-only; nothing ever writes to them.
                warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
                return LoadedMethod(plan, self._arenas(plan), self._source, self._delegates(plan))
        except ProgramError as error:
            if error.method is not None:
                raise
            raise ProgramError(str(error), method=plan.name) from error

    def _arenas(self, plan: ExecutionPlan) -> list[Arena]:
        return make_arenas(plan.non_const_buffer_sizes)

    def _delegates(self, plan: ExecutionPlan) -> list[Delegate]:
        if not plan.delegates:
            return []
        named = {item.key: as_view(item.data) for item in self._program.named_data}
        delegates = []
        for number, item in enumerate(plan.delegates):
            blobs, at = self._program.backend_delegate_data, item.processed
            if at.location != DataLocation.INLINE or not 0 <= at.index < len(blobs):
                raise ProgramError(f"delegate {number} points to blob {at.index} of {len(blobs)}")
            delegates.append(
                Delegate(
                    item.id,
                    find_runtime(item.id, self._backends, plan.name),
                    as_view(blobs[at.index].data),
                    item.compile_specs,
                    named,
                    method=plan.name,
                )
            )
        return delegates
