"""Constants and mutable state of a program, and their assignment to partitions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import Node

from lowerdeck.lowered_module._torch_private import fake_mode_of
from lowerdeck.lowered_module.program.functional import changing_inputs
from lowerdeck.lowered_module.program.graphs import inputs_of, new_values
from lowerdeck.lowered_module.program.tags import DELEGATION_TAG, USED_ELSEWHERE
from lowerdeck.torch_base import set_program_parts

DATA = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
"""The kinds of inputs that are tensors of the program."""


def constant_inputs(program: ExportedProgram) -> dict[Node, str]:
    """Return placeholders whose tensors no call changes, with the tensors' names in the state."""
    changing = changing_inputs(program)
    return {
        node: spec.target
        for node, spec in inputs_of(program)
        if spec.kind in DATA and spec.target is not None and node not in changing
    }


def constant_names(program: ExportedProgram) -> dict[str, str]:
    """Return the name in the state of each placeholder whose tensor no call changes.

    Excluded are tensors that the program mutates, also if its signature does not list that, and
    tensors that another method lowered together mutates.

    Args:
        program: The whole program, or one partition as a separate program.

    Returns:
        For each placeholder that is an unchanged parameter, buffer or lifted tensor constant: the
        key of its tensor in ``state_dict`` or ``constants``.
    """
    return {node.name: target for node, target in constant_inputs(program).items()}


def add_constants(program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> list[Node]:
    """Add constant tensors to a program, in place; return their placeholders."""
    graph, signature = program.graph, program.graph_signature
    mode = fake_mode_of([node.meta.get("val") for node, _ in inputs_of(program)])
    specs, constants = list(signature.input_specs), dict(program.constants)
    # Constants come before the user's inputs.
    kinds = [*(spec.kind for spec in specs), InputKind.USER_INPUT]
    at = kinds.index(InputKind.USER_INPUT)
    new_nodes, new_specs = [], []
    with graph.inserting_before(next(islice(graph.nodes, at, None))):
        for tensor in tensors:
            placeholder = graph.placeholder(f"_added_constant_{len(constants)}")
            placeholder.meta["val"] = (
                tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)
            )
            constants[placeholder.name] = tensor
            argument = TensorArgument(placeholder.name)
            new_specs.append(InputSpec(InputKind.CONSTANT_TENSOR, argument, placeholder.name))
            new_nodes.append(placeholder)
    specs[at:at] = new_specs
    signature = ExportGraphSignature(specs, list(signature.output_specs))
    set_program_parts(program, graph_signature=signature, constants=constants)
    return new_nodes


def constant_tensors(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the tensor of each placeholder, if no call changes it.

    Args:
        program: One partition as a separate program.

    Returns:
        The tensors, by placeholder name.
    """
    tensors = {**program.constants, **program.state_dict}
    return {name: tensors[target].detach() for name, target in constant_names(program).items()}


def tag_constant_data(edge_program: ExportedProgram) -> None:
    """Tag each parameter, buffer and lifted constant that tagged nodes read, in place.

    Call it after tagging the nodes. Buffers that the program mutates are skipped (see
    ``tag_mutated_buffer``). Data read by several partitions gets the first of their tags in
    string order, and is owned by all of them. Unread data gets the tag of the first tagged node.

    Args:
        edge_program: The program that a partitioner is tagging.
    """
    tagged = (node.meta.get(DELEGATION_TAG) for node in edge_program.graph.nodes)
    first = next((tag for tag in tagged if tag is not None), None)
    for node in constant_inputs(edge_program):
        tags = {tag for user in node.users if (tag := user.meta.get(DELEGATION_TAG)) is not None}
        if tags:
            node.meta[DELEGATION_TAG] = min(tags)
        elif not node.users and first is not None:
            node.meta[DELEGATION_TAG] = first


def tag_mutated_buffer(edge_program: ExportedProgram) -> None:
    """Tag each mutated buffer whose new value a partition computes, in place.

    Call it after tagging the nodes. The partition then owns the buffer, which is neither an
    argument nor a result of the delegate. Buffers are skipped if their old value is read elsewhere
    (tag such a buffer yourself to have the partition return the old value), or if another method
    lowered together uses them.

    Args:
        edge_program: The program that a partitioner is tagging.
    """
    values = new_values(edge_program)
    for node, spec in inputs_of(edge_program):
        value = values.get(str(spec.target))
        if spec.kind not in DATA or not isinstance(value, Node) or value.op == "placeholder":
            continue
        tag = value.meta.get(DELEGATION_TAG)
        # With USED_ELSEWHERE the delegate would change its private state, which the other
        # methods do not see.
        readers = {user.meta.get(DELEGATION_TAG) for user in node.users}
        if tag is not None and USED_ELSEWHERE not in node.meta and readers <= {tag}:
            node.meta[DELEGATION_TAG] = tag
