"""Loaded program; its methods are loaded lazily."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from lowerdeck.runner.debug_info import DebugMaps
from lowerdeck.runner.delegates import BackendRuntime, Delegate, find_runtime
from lowerdeck.runner.errors import MemoryPlanError, MissingKernelError, ProgramError
from lowerdeck.runner.lock import NonReentrantLock
from lowerdeck.runner.method import LoadedMethod, Memory
from lowerdeck.runner.shared_state import check_offsets, state_memories
from lowerdeck.runner.values.arena import Arena
from lowerdeck.runner.values.sources import ExternalTensor, ProgramData, as_view, make_tensor
from lowerdeck.runner.values.tensors import read_spec
from lowerdeck.serializer import (
    CompileSpec,
    DataLocation,
    ExecutionPlan,
    Program,
    Tensor,
    method_digest,
)
from lowerdeck.torch_base import collector_held

_LOADING = threading.RLock()
"""Held while a method is loaded, which changes warning filters and the garbage collector of the
process. Reentrant: a delegate may load another program.
"""


class LoadedProgram:
    """Loaded program; its methods run one at a time.

    Created by :func:`lowerdeck.runner.load`. All methods share the state and one lock: using the
    program while one of them runs, in another thread or from a delegate, raises ``BusyError``. Use
    one :meth:`clone` per thread.

    Args:
        external: Tensors of the ``.ptd`` by name.
        backends: Runtimes by backend id; they take precedence over installed ones.
        memory: As in the argument of :func:`lowerdeck.runner.load`.
        debug: Debug maps of instructions.
        custom_kernels: Full names of additionally allowed operators.

    Raises:
        ProgramError: Two methods have the same name.
        MemoryPlanError: The offsets of shared state conflict between methods.
    """

    def __init__(
        self,
        program: Program,
        *,
        external: Mapping[str, ExternalTensor],
        backends: Mapping[str, BackendRuntime],
        memory: Memory = "strict",
        debug: DebugMaps | None = None,
        custom_kernels: Collection[str] = (),
    ) -> None:
        self._custom_kernels = custom_kernels
        self._memory = memory
        self._external = external
        self._lock = NonReentrantLock()
        self._debug = debug
        self._program = program
        self._source = ProgramData(program, external)
        self._backends = backends
        self._plans = {plan.name: plan for plan in program.execution_plan}
        if len(self._plans) != len(program.execution_plan):
            raise ProgramError("two methods of the program have the same name")
        self._loaded: dict[str, LoadedMethod] = {}
        self._state = state_memories(program.execution_plan)
        if memory != "unchecked":
            check_offsets(program.execution_plan, self._state)
        self._shared: dict[int, Arena] = {}

    def __repr__(self) -> str:
        """Return the names of the methods."""
        return f"<LoadedProgram {', '.join(self.methods)}>"

    @property
    def methods(self) -> list[str]:
        """Return the names of the methods in file order."""
        return list(self._plans)

    def method(self, name: str = "forward") -> LoadedMethod:
        """Return the method ``name``, loaded at first use.

        Raises:
            ProgramError: The method does not exist or is invalid, or its kernels, backends or data
                are missing.
            MemoryPlanError: The memory plan of the method is invalid.
            BusyError: The method is not loaded yet, and another method is running.
        """
        if name not in self._plans:
            raise ProgramError(
                f"there is no method {name!r}; the program has {', '.join(self.methods)}"
            )
        loaded = self._loaded.get(name)
        if loaded is not None:
            return loaded
        with self._lock:
            return self._loaded.setdefault(name, self._load(self._plans[name]))

    def run(self, name: str, *inputs: Any, profile: bool = False, **kwargs: Any) -> Any:
        """Return the result of one call of the method ``name``, in the model's structure.

        Args:
            *inputs: Positional inputs, flat or in the model's structure.
            profile: Whether to return a :class:`Profile` with the result, and the times and values
                of all instructions.
            **kwargs: Keyword inputs of the model.

        Raises:
            ProgramError: The method does not exist or cannot be loaded.
            InputError: The inputs do not match; no instruction has run.
            BusyError: Another call of this program has not returned; this one had no effect.
            ExecutionError: An instruction failed, or the memory plan of the method is invalid.
        """
        method = self.method(name)
        return method.profile(*inputs, **kwargs) if profile else method(*inputs, **kwargs)

    def reset(self) -> None:
        """Reset all state to its initial value; previously obtained methods keep the old state.

        Raises:
            BusyError: A method of this program is running.
        """
        with self._lock:
            self._loaded.clear()
            self._shared.clear()

    def clone(self) -> LoadedProgram:
        """Return a copy of the program with separate memory and state, for another thread.

        Constants are shared. State has its initial value, not the current one. Delegates are
        initialized again, by a new instance of the backend's runtime, or by the object passed
        to ``load``, which then serves several threads.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor  # doctest: +SKIP
            >>> programs = [program.clone() for _ in range(4)]  # doctest: +SKIP
        """
        return LoadedProgram(
            self._program,
            external=self._external,
            backends=self._backends,
            memory=self._memory,
            debug=self._debug,
            custom_kernels=self._custom_kernels,
        )

    def _load(self, plan: ExecutionPlan) -> LoadedMethod:
        try:
            with _LOADING, collector_held(), warnings.catch_warnings():
                # Constants are mapped read-only and never written.
                warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
                return LoadedMethod(
                    plan,
                    self._arenas(plan),
                    self._source,
                    self._delegates(plan),
                    memory=self._memory,
                    debug=self._debug,
                    custom_kernels=self._custom_kernels,
                    lock=self._lock,
                    digest=functools.cache(functools.partial(method_digest, self._program, plan)),
                )
        except (MemoryPlanError, MissingKernelError):
            raise
        except ProgramError as error:
            raise ProgramError(str(error), method=plan.name) from error
        except (ArithmeticError, MemoryError, RuntimeError, TypeError, ValueError) as error:
            # Torch reports impossible tensors, such as 2**62 elements, with various errors.
            raise ProgramError(f"{type(error).__name__}: {error}", method=plan.name) from error

    def _arenas(self, plan: ExecutionPlan) -> list[Arena]:
        arenas = []
        for number, size in enumerate(plan.non_const_buffer_sizes):
            if number not in self._state:
                arenas.append(Arena(size))
                continue
            if number not in self._shared:
                self._shared[number] = self._shared_arena(number)
            arenas.append(self._shared[number])
        return arenas

    def _shared_arena(self, number: int) -> Arena:
        """Return an arena with the initial state of all methods.

        If each method initialized its state when loaded, it could reset state that another method
        has written.
        """
        arena = Arena(self._state[number], shared=True)
        states = [
            (index, value.val)
            for plan in self._program.execution_plan
            for index, value in enumerate(plan.values)
            if isinstance(value.val, Tensor)
            and value.val.allocation_info is not None
            and value.val.allocation_info.memory_id == number
        ]
        # Longest first: state of one method may be part of another's.
        for index, tensor in sorted(states, key=lambda state: -state[1].nbytes):
            # Errors of a method are reported when it is loaded.
            with suppress(ProgramError, RuntimeError):
                spec = read_spec(index, tensor)
                make_tensor(spec, tensor, [arena] * (number + 1), self._source)
        return arena

    def _delegates(self, plan: ExecutionPlan) -> list[Delegate]:
        if not plan.delegates:
            return []
        named = self._source.named()
        delegates = []
        for number, item in enumerate(plan.delegates):
            blobs, at = self._program.backend_delegate_data, item.processed
            if at.location != DataLocation.INLINE or not 0 <= at.index < len(blobs):
                raise ProgramError(
                    f"delegate {number}: found payload {at.index} in {at.location.name}; expected "
                    f"an index below {len(blobs)} in INLINE"
                )
            delegates.append(
                Delegate(
                    item.id,
                    find_runtime(item.id, self._backends),
                    as_view(blobs[at.index].data),
                    [CompileSpec(s.key, as_view(s.value)) for s in item.compile_specs],
                    named,
                )
            )
        return delegates
