"""Which placeholders of a program no run changes, and their tensors."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from lowerdeck.lowered_module.program.functional import changing_inputs

_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def constant_names(program: ExportedProgram) -> dict[str, str]:
    """Return the name in the state of each placeholder that no run changes.

    What a node writes in place, which the signature of a program straight from
    ``torch.export.export`` does not say, is none of them; nor is what another method changes of
    those that are lowered together. ``tag_constant_data`` goes by the same rule.

    Args:
        program: The whole program, or one partition as a program of its own.

    Returns:
        For each placeholder that is an unchanged parameter, buffer or lifted tensor constant: the
        key of its tensor in ``state_dict`` or ``constants``.
    """
    changing = {node.name for node in changing_inputs(program)}
    return {
        spec.arg.name: spec.target
        for spec in program.graph_signature.input_specs
        if spec.kind in _KINDS and spec.target is not None and spec.arg.name not in changing
    }


def constant_tensors(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the tensor of each placeholder that no run changes.

    Args:
        program: One partition as a program of its own.

    Returns:
        Placeholder names and their tensors.
    """
    state, constants = program.state_dict, program.constants
    return {
        name: (state[target] if target in state else constants[target]).detach()
        for name, target in constant_names(program).items()
    }
