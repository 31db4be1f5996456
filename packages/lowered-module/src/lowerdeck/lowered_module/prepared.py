"""A program that is called often: its eager module is made once and not at every call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from lowerdeck.lowered_module._torch_private import bare_program, lazy_clone
from lowerdeck.lowered_module.signature import STATE_MUTATIONS, flat_call_graph


class PreparedProgram(ExportedProgram):
    """An ExportedProgram with flat inputs and outputs that keeps its eager module.

    Make one with ``PreparedProgram.of``.
    """

    _module: torch.fx.GraphModule | None

    @classmethod
    def of(cls, program: ExportedProgram) -> PreparedProgram:
        """Return ``program`` as a prepared one: the same graph and tensors, flat in and out."""
        specs = program.graph_signature
        prepared = bare_program(
            program.graph_module,
            specs,
            state_dict=program.state_dict,
            constants=program.constants,
            range_constraints=program.range_constraints,
            module_call_graph=flat_call_graph(
                sum(spec.kind == InputKind.USER_INPUT for spec in specs.input_specs),
                sum(spec.kind == OutputKind.USER_OUTPUT for spec in specs.output_specs),
            ),
            verifiers=list(program.verifiers),
            cls=cls,
        )
        assert isinstance(prepared, cls)
        prepared._module = None
        return prepared

    def with_own_state(self) -> PreparedProgram:
        """Return a program on the same graph and constants whose mutable state is its own."""
        copied = PreparedProgram.of(self)
        copied._state_dict = dict(self.state_dict)
        copied._constants = dict(self.constants)
        for target in mutated_targets(self):
            for holder in (copied._state_dict, copied._constants):
                if target in holder:
                    holder[target] = lazy_clone(cast("torch.Tensor", holder[target]))
        return copied

    def module(self, check_guards: bool = True) -> torch.fx.GraphModule:
        """Return the eager module; the same one at every call."""
        if self._module is None:
            self._module = super().module(check_guards=check_guards)
        return self._module


def mutated_targets(program: ExportedProgram) -> Iterator[str]:
    """Yield the names of the buffers and parameters that a call of ``program`` changes."""
    for spec in program.graph_signature.output_specs:
        if spec.kind in STATE_MUTATIONS and spec.target is not None:
            yield spec.target


def own_mutable_state(program: ExportedProgram, values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` in which what ``program`` mutates is replaced by copies."""
    changed = set(mutated_targets(program))
    return {
        name: lazy_clone(value) if name in changed else value for name, value in values.items()
    }
