"""Loaded method of a program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch

from lowerdeck.runner.debug_info import DebugMaps, SourceFinder
from lowerdeck.runner.delegates import Delegate
from lowerdeck.runner.errors import ExecutionError, InputError
from lowerdeck.runner.instructions import run_chains
from lowerdeck.runner.linking.linking import Linker
from lowerdeck.runner.lock import NonReentrantLock
from lowerdeck.runner.memory.overlaps import MemoryPlan
from lowerdeck.runner.memory.poison import Poison
from lowerdeck.runner.profile import Profile, Recorder
from lowerdeck.runner.values.arena import Arena
from lowerdeck.runner.values.frame import Frame, Freed
from lowerdeck.runner.values.inputs import Signature, bind_fixed, bind_input
from lowerdeck.runner.values.sources import ProgramData
from lowerdeck.serializer import ExecutionPlan, FreeCall
from lowerdeck.serializer import Tensor as TensorValue

MAX_INSTRUCTIONS = 10_000_000
"""Limit of executed instructions per call, which ends endless loops."""

Memory = Literal["strict", "poison", "unchecked"]
"""Check the memory plan; also poison dead memory; or neither."""


class LoadedMethod:
    """A method with allocated tensors and bound instructions.

    Created by :func:`lowerdeck.runner.load`. The methods of a program share memory: a concurrent
    call, from another thread or from a delegate of this call, raises ``BusyError`` without effect.
    Use one :meth:`LoadedProgram.clone` per thread.

    Args:
        memory: As in the argument of :func:`lowerdeck.runner.load`.
        debug: Debug maps of instructions.
        custom_kernels: Full names of additionally allowed operators.
        lock: Lock of the memory shared with other methods.
        digest: Returns the digest that identifies the method in profiles.

    Attributes:
        signature: Structure of inputs and outputs.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        arenas: Sequence[Arena],
        source: ProgramData,
        delegates: Sequence[Delegate],
        *,
        memory: Memory,
        debug: DebugMaps | None,
        custom_kernels: Collection[str] = (),
        lock: NonReentrantLock | None = None,
        digest: Callable[[], str] = str,
    ) -> None:
        self._lock = lock or NonReentrantLock()
        self._digest = digest
        self.name: str = plan.name
        self.plan = plan
        self._sources = SourceFinder(plan, debug)
        self._poison: Poison | None = None
        self.signature: Signature = read_signature(plan)
        with torch.inference_mode():
            # Inference tensors skip autograd bookkeeping.
            self._frame = Frame(plan, arenas, source)
            linker = Linker(plan, self._frame, delegates, custom_kernels)
            self._chains = linker.link()
            self._freed = _freed(plan, self._frame)
            self._outputs = [self._frame.check(index, "an output") for index in plan.outputs]
            self._checks: list[Callable[[Any], None]] = []
            self._setters: list[Callable[[Any], None] | None] = []
            self._bind_inputs(plan.inputs)
            if memory != "unchecked":
                checked = MemoryPlan(
                    self.name,
                    self._frame.specs,
                    self._chains,
                    linker.moves,
                    inputs=plan.inputs,
                    outputs=plan.outputs,
                )
                if memory == "poison":
                    self._poison = Poison(checked, self._chains, arenas)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of one call in the model's structure.

        Args:
            *args: Positional inputs, flat or in the model's structure.
            **kwargs: Keyword inputs of the model.

        Raises:
            InputError: The inputs do not match; no instruction has run.
            BusyError: Another call of this program has not returned; this one had no effect.
            ExecutionError: An instruction failed.
        """
        outputs = self.run_flat(self.signature.flatten(args, kwargs))
        return self.signature.unflatten(outputs)

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of the file's named state: the model's buffers.

        State inside delegates is not included.

        Example:
            >>> load("counter.pte").method().state()  # doctest: +SKIP
            {'calls': tensor([0.])}
        """
        named: dict[str, torch.Tensor] = {}
        for index, spec in enumerate(self._frame.specs):
            value = self._frame.values[index]
            if spec is None or not spec.has_state or not isinstance(value, TensorValue):
                continue
            name = value.extra_tensor_info and value.extra_tensor_info.fully_qualified_name
            if name:
                register = self._frame.registers[index]
                assert isinstance(register, torch.Tensor)
                # Views of a state share its name and are smaller or come later.
                if name not in named or register.numel() > named[name].numel():
                    named[name] = register
        return {name: register.clone() for name, register in named.items()}

    def run_flat(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the flat outputs of one call: tensors, numbers and strings.

        Args:
            inputs: Flat inputs in the method's order.

        Raises:
            InputError: An input does not match; no instruction has run.
            BusyError: Another call of this program has not returned; this one had no effect.
            ExecutionError: An instruction failed.
        """
        with self._lock:
            with torch.inference_mode():
                self._set_inputs(inputs)
                observer = None if self._poison is None else self._poison.run
                run_chains(self._chains, self.name, MAX_INSTRUCTIONS, observer)
            return self._get_outputs()

    def profile(self, *args: Any, values: bool = True, **kwargs: Any) -> Profile:
        """Return the profile of one call: its result and instruction times.

        Args:
            *args: Positional inputs, flat or in the model's structure.
            values: Whether to keep a copy of each instruction's results.
            **kwargs: Keyword inputs of the model.

        Raises:
            InputError: The inputs do not match; no instruction has run.
            BusyError: Another call of this program has not returned; this one had no effect.
            ExecutionError: An instruction failed.

        Example:
            >>> profile = load("model.pte").method("forward").profile(x)  # doctest: +SKIP
            >>> print(profile.table(limit=10))  # doctest: +SKIP
        """
        inputs = self.signature.flatten(args, kwargs)
        recorder = Recorder(
            self._chains, self._frame, self._sources, self._poison, keep_values=values
        )
        with self._lock:
            with torch.inference_mode():
                self._set_inputs(inputs)
                run_chains(self._chains, self.name, MAX_INSTRUCTIONS, recorder)
            outputs = self._get_outputs()
        result = self.signature.unflatten(outputs)
        return Profile(self.name, result, tuple(recorder.events), self._digest())

    def _get_outputs(self) -> list[Any]:
        try:
            with torch.no_grad():
                # Copy outside of inference mode: autograd rejects inference tensors.
                return [_copied(self._frame.registers[index]) for index in self._outputs]
        except (RuntimeError, TypeError) as error:
            raise ExecutionError(f"cannot read the outputs of {self.name!r}: {error}") from error

    def _set_inputs(self, inputs: Sequence[Any]) -> None:
        if len(inputs) != len(self._checks):
            raise InputError(
                f"{len(inputs)} inputs given; the method takes {len(self._checks)}: "
                f"{', '.join(self.signature.names) or 'none'}"
            )
        for check, value in zip(self._checks, inputs, strict=True):
            check(value)
        for index, register in self._freed:
            self._frame.registers[index] = register
        if self._poison is not None:
            self._poison.start()
        for setter, value in zip(self._setters, inputs, strict=True):
            if setter is not None:
                setter(value)

    def _bind_inputs(self, indices: Sequence[int]) -> None:
        for name, index in zip(self.signature.names, indices, strict=True):
            self._frame.check(index, name)
            spec, register = self._frame.specs[index], self._frame.registers[index]
            if spec is None or not isinstance(register, torch.Tensor):
                self._checks.append(bind_fixed(name, register))
                self._setters.append(None)
                continue
            self._frame.require_writable(index, name)
            check, setter = bind_input(name, register, spec)
            self._checks.append(check)
            self._setters.append(setter)


def read_signature(plan: ExecutionPlan) -> Signature:
    """Return the structure of a method's inputs and outputs."""
    meta = plan.container_meta_type
    return Signature(
        meta.encoded_inp_str if meta is not None else "",
        meta.encoded_out_str if meta is not None else "",
        len(plan.inputs),
        len(plan.outputs),
    )


def _freed(plan: ExecutionPlan, frame: Frame) -> list[tuple[int, object]]:
    """Return each freed register with its tensor, which the next call restores."""
    return [
        (item.instr_args.value_index, frame.registers[item.instr_args.value_index])
        for chain in plan.chains
        for item in chain.instructions
        if isinstance(item.instr_args, FreeCall)
    ]


def _copied(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Freed):
        raise TypeError("an output was freed")
    return [_copied(item) for item in value] if isinstance(value, list) else value
