"""What a partitioner calls last: give the data that partitions read to the partitions."""

from __future__ import annotations

from collections.abc import Iterator

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Node

from lowerdeck.lowered_module.program.functional import changing_inputs
from lowerdeck.lowered_module.program.prepared import mutated_targets
from lowerdeck.lowered_module.program.tags import DELEGATION_TAG, USED_ELSEWHERE


def tag_constant_data(edge_program: ExportedProgram) -> None:
    """Tag each parameter, buffer and lifted constant that tagged nodes read, in place.

    Call it after tagging the nodes. Buffers that the program mutates are left alone (see
    ``tag_mutated_buffer``). Data read by several partitions gets the smallest of their tags, and
    is owned by all of them. Data that nobody reads goes to the first partition, so that nothing
    dangles.

    Args:
        edge_program: The program that a partitioner is tagging.
    """
    changing = changing_inputs(edge_program)
    tagged = (node.meta.get(DELEGATION_TAG) for node in edge_program.graph.nodes)
    first = next((tag for tag in tagged if tag is not None), None)
    for node, _ in _data(edge_program):
        if node in changing:
            continue
        tags = _reader_tags(node)
        if tags:
            node.meta[DELEGATION_TAG] = min(tags)
        elif not node.users and first is not None:
            node.meta[DELEGATION_TAG] = first


def tag_mutated_buffer(edge_program: ExportedProgram) -> None:
    """Tag each mutated buffer whose new value a partition computes, in place.

    Call it after tagging the nodes. The partition then owns the buffer, and no call passes it in
    or out. A buffer whose old value others read too is left to the program; tag it yourself to
    have the partition return the old value as well. So is one that another method uses, of those
    that are lowered together.

    Args:
        edge_program: The program that a partitioner is tagging.
    """
    outputs = edge_program.graph.output_node().args[0]
    specs = edge_program.graph_signature.output_specs
    new_values = {spec.target: value for value, spec in zip(outputs, specs, strict=True)}
    changed = set(mutated_targets(edge_program))
    for node, spec in _data(edge_program):
        value = new_values.get(spec.target) if spec.target in changed else None
        tag = value.meta.get(DELEGATION_TAG) if isinstance(value, Node) else None
        if tag is None or (isinstance(value, Node) and value.op == "placeholder"):
            continue
        if USED_ELSEWHERE in node.meta:
            # The delegate would change a state of its own, which the other methods do not see.
            continue
        readers = {user.meta.get(DELEGATION_TAG) for user in node.users}
        if readers <= {tag}:
            node.meta[DELEGATION_TAG] = tag


def _data(program: ExportedProgram) -> Iterator[tuple[Node, InputSpec]]:
    placeholders = program.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            yield node, spec


def _reader_tags(node: Node) -> set[str]:
    tags = (user.meta.get(DELEGATION_TAG) for user in node.users)
    return {tag for tag in tags if tag is not None}
