"""What the placeholders of a partition are: its constants, its state, its true inputs."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from lowerdeck.demo_backends._torch_private import OpOverload, is_mutable, returns_alias
from lowerdeck.lowered_module import DELEGATION_TAG, tag_constant_data


def constant_names(program: ExportedProgram) -> dict[str, str]:
    """Return the name in the state of each placeholder that no run changes.

    Args:
        program: The whole program, or one partition as a program of its own.

    Returns:
        For each placeholder that is a parameter, an unmutated buffer or a lifted tensor
        constant: the key of its tensor in ``state_dict`` or ``constants``.
    """
    mutated = set(program.graph_signature.buffers_to_mutate.values())
    written = written_in_place(program)
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    return {
        spec.arg.name: spec.target
        for spec in program.graph_signature.input_specs
        if spec.kind in kinds
        and spec.target is not None
        and spec.target not in mutated
        and spec.arg.name not in written
    }


def written_in_place(program: ExportedProgram) -> set[str]:
    """Return the names of the placeholders that a node writes to, itself or through a view.

    A program straight from ``torch.export.export`` may do so, and its signature does not say it.

    Args:
        program: Any program.

    Returns:
        Names of placeholders.
    """
    return {
        node.name for node in program.graph.nodes if node.op == "placeholder" and _is_written(node)
    }


def tag_constants(program: ExportedProgram) -> None:
    """Tag what tagged nodes read and nobody writes, in place.

    Args:
        program: The program that a partitioner is tagging.
    """
    tag_constant_data(program)
    written = written_in_place(program)
    for node in program.graph.nodes:
        if node.name in written:
            node.meta.pop(DELEGATION_TAG, None)


def _is_written(node: Node) -> bool:
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            op = user.target
            if isinstance(op, OpOverload) and is_mutable(op):
                return True
            views = isinstance(op, OpOverload) and returns_alias(op)
            if (views or op is operator.getitem) and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def constant_tensors(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the tensor behind each placeholder that no run changes.

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


def user_inputs(program: ExportedProgram) -> list[Node]:
    """Return the placeholders that the caller fills, in order."""
    wanted = set(program.graph_signature.user_inputs)
    return [
        node for node in program.graph.nodes if node.op == "placeholder" and node.name in wanted
    ]


def output_nodes(program: ExportedProgram) -> Sequence[Node | None]:
    """Return what the program's outputs are, in order: nodes, or None."""
    output = next(node for node in reversed(program.graph.nodes) if node.op == "output")
    returned = output.args[0]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]
