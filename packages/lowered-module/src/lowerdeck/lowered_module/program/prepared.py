"""Programs prepared for repeated calls in eager."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from lowerdeck.lowered_module._torch_private import active_fake_mode, fake_mode_of
from lowerdeck.lowered_module.program.edge_form import in_torch_operators
from lowerdeck.lowered_module.program.functional import changed_memory
from lowerdeck.lowered_module.program.graphs import MUTATIONS, inputs_of, new_values, outputs_of
from lowerdeck.lowered_module.program.pickling import dump_program, load_program
from lowerdeck.lowered_module.program.signature import flat_call_graph
from lowerdeck.torch_base import (
    Extent,
    FakeTensorMode,
    MemoryMap,
    OwnCopies,
    set_program_parts,
    storage_identity,
    with_parts,
)


class PortableProgram(ExportedProgram):
    """An ExportedProgram that can be pickled and deep-copied with all of its nodes.

    Create one with ``with_parts(program, PortableProgram)``.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Return this package's pickled form: torch cannot load programs with ``torch.cond``."""
        tensors: list[torch.Tensor] = []
        return load_program, (dump_program(self, tensors), tensors)

    def __copy__(self) -> ExportedProgram:
        """Return another program with the same parts."""
        return with_parts(self, type(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> PortableProgram:
        """Return a deep copy whose nodes keep all metadata."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy({**self.__dict__, "_module": None}, memo))
        return copied


class PreparedProgram(PortableProgram):
    """An ExportedProgram with flat inputs and outputs, prepared for calls in eager.

    Create one with ``PreparedProgram.of``.
    """

    _module: PreparedModule | None

    @classmethod
    def of(cls, program: ExportedProgram) -> PreparedProgram:
        """Return ``program`` prepared: the same graph and tensors, flat inputs and outputs."""
        specs = program.graph_signature
        prepared = with_parts(
            program,
            cls,
            range_constraints=dict(program.range_constraints),
            module_call_graph=flat_call_graph(specs.input_specs, specs.output_specs),
            verifiers=list(program.verifiers),
            example_inputs=None,
            guards_code=[],
        )
        prepared._module = None  # type: ignore[attr-defined]
        return cast("PreparedProgram", prepared)

    def with_own_state(self) -> PreparedProgram:
        """Return a program with the same graph and constants and separate mutable state."""
        copied = PreparedProgram.of(self)
        give_own_state(copied)
        return copied

    def module(self, check_guards: bool = True) -> Any:
        """Return the eager module, the same one at every call.

        It runs this program's graph on flat arguments, without checking them.
        ``ExportedProgram.module(program)`` creates torch's module, which checks them.

        Args:
            check_guards: As for ``ExportedProgram.module``; used only for programs with effect
                tokens, which need torch's module.
        """
        if any(spec.kind == InputKind.TOKEN for spec in self.graph_signature.input_specs):
            return super().module(check_guards=check_guards)
        if self._module is None or not self._module.is_of(self):
            self._module = PreparedModule(self)
        return self._module


class PreparedModule(torch.nn.Module):
    """Run a program's graph with the program's state, and update the state.

    Args:
        program: The program. Its tensors are used, not copied.
    """

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        # In a tuple, so that torch does not register the graph and the tensors.
        self._source = (program.graph_module, program.graph_signature)
        values = {**program.constants, **program.state_dict}
        inputs = program.graph_signature.input_specs
        self._state = (
            [
                None if spec.kind == InputKind.USER_INPUT else values[cast("str", spec.target)]
                for spec in inputs
            ],
        )
        self._user_inputs = [
            index for index, spec in enumerate(inputs) if spec.kind == InputKind.USER_INPUT
        ]
        places = {spec.target or node.name: n for n, (node, spec) in enumerate(inputs_of(program))}
        # The position of the mutated input for each output, None for what is returned.
        self._written = [
            places[str(spec.target)] if spec.kind in MUTATIONS else None
            for _, spec in outputs_of(program)
        ]
        self._fake: weakref.WeakKeyDictionary[FakeTensorMode, list[Any]]
        self._fake = weakref.WeakKeyDictionary()

    def is_of(self, program: ExportedProgram) -> bool:
        """Return whether this module was created from the current parts of ``program``."""
        return self._source == (program.graph_module, program.graph_signature)

    def forward(self, *args: Any) -> tuple[Any, ...]:
        """Return the program's outputs for flat arguments, one per user input.

        No output is a view of an input, of state, or of another output: torch's tracing relies on
        that.
        """
        mode = fake_mode_of(args) or active_fake_mode()
        values = list(self._state[0] if mode is None else self._fake_state(mode))
        for index, value in zip(self._user_inputs, args, strict=True):
            values[index] = value
        used = {*map(_storage_of, values)} - {None}
        written = [values[index] for index in self._written if index is not None]
        changing = {*map(_storage_of, written)} - {None}
        returned: list[Any] = []
        new: list[tuple[int, Any]] = []
        # Copy all before any mutation: an output, or another new value, may be a view of state
        # that is about to be written.
        for value, place in zip(self._source[0](*values), self._written, strict=True):
            storage = _storage_of(value)
            own = value.clone() if storage in (used if place is None else changing) else value
            if place is None:
                returned.append(own)
                used |= {storage} - {None}
            else:
                new.append((place, own))
        for index, own in new:
            values[index].copy_(own)
        return tuple(returned)

    def _fake_state(self, mode: FakeTensorMode) -> list[Any]:
        state = self._fake.get(mode)
        # One set of fakes per mode: torch does not mix fakes of two traces.
        if state is None:
            state = [
                mode.from_tensor(value, static_shapes=True)
                if isinstance(value, torch.Tensor)
                else value
                for value in self._state[0]
            ]
            self._fake[mode] = state
        return state


def _storage_of(value: Any) -> int | None:
    return storage_identity(value) if isinstance(value, torch.Tensor) else None


class MutableStateSnapshot:
    """Copies of mutable state, so that runs on the copies leave the originals unchanged.

    Tensors that share memory in the programs share it in the copies.

    Args:
        programs: The methods of one file.
    """

    def __init__(self, programs: Iterable[ExportedProgram]) -> None:
        self._programs = list(programs)
        # In the Edge dialect any operator may alias its arguments.
        self.changed: MemoryMap = changed_memory(map(in_torch_operators, self._programs))
        tensors = [
            v for p in self._programs for v in (*p.state_dict.values(), *p.constants.values())
        ]
        self._copies = OwnCopies(filter(self._is_changed, tensors))

    def of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``values`` with mutable tensors replaced by their copies."""
        return {
            name: self._copies.of(value) if self._is_changed(value) else value
            for name, value in values.items()
        }

    def _is_changed(self, value: object) -> bool:
        if not self.changed or not isinstance(value, torch.Tensor):
            return False
        return self.changed.find(Extent.of(value)) is not None


def give_own_state(program: ExportedProgram) -> None:
    """Replace the mutable tensors of ``program`` by its own copies, in place."""
    if new_values(program):
        copies = MutableStateSnapshot([program])
        set_program_parts(
            program,
            state_dict=copies.of(program.state_dict),
            constants=copies.of(program.constants),
        )
