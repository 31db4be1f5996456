"""Ownership of parameters, buffers, lifted constants and custom objects by delegates."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Node

from lowerdeck.lowered_module._executorch import clone_operator
from lowerdeck.lowered_module.errors import OwnershipError, PartitionError
from lowerdeck.lowered_module.partition.grouping import Groups
from lowerdeck.lowered_module.program.functional import changing_inputs
from lowerdeck.lowered_module.program.graphs import inputs_of, new_values
from lowerdeck.lowered_module.program.signature import OWNABLE_KINDS
from lowerdeck.lowered_module.program.tags import DELEGATION_TAG, USED_ELSEWHERE
from lowerdeck.torch_base import MemoryUse, find_schema

Owned = dict[str, list[Node]]


def settle_ownership(program: ExportedProgram, groups: Groups, tags: Container[str]) -> Owned:
    """Return the placeholders owned by each partition, in the program's order.

    A tagged constant is owned by every partition that reads it, and by the program if another node
    reads it; the tensor is shared, not copied. A tagged mutated buffer is owned by the partition
    of its tag, which must compute the new value. Other readers of its old value, or of a view that
    the partition computes, get a clone from the partition, inserted in place.

    Args:
        program: The outermost program, with tags on its placeholders.
        groups: The nodes of each partition of the outermost graph.
        tags: The tags with a backend.

    Raises:
        PartitionError: A user input is tagged.
        OwnershipError: A constant marked ``no_copy`` would be shared, or a mutated buffer cannot
            be owned by its partition.
    """
    tag_of = {node: tag for tag, nodes in groups.items() for node in nodes}
    values = new_values(program)
    changing = changing_inputs(program)
    owned: Owned = {}
    memory: MemoryUse | None = None
    for node, spec in inputs_of(program):
        tag = node.meta.get(DELEGATION_TAG)
        if tag is None or tag not in tags:
            continue
        if spec.kind == InputKind.USER_INPUT:
            raise PartitionError(
                "placeholder node for non-params, non-buffer, and non-tensor constants should not "
                f"be tagged: input {node.name!r} of the program is tagged {tag!r}; a delegate "
                "owns parameters, buffers and constants only: leave user inputs untagged"
            )
        if spec.kind not in OWNABLE_KINDS:
            continue
        if spec.target in values and USED_ELSEWHERE in node.meta:
            raise OwnershipError(
                f"buffer {spec.target!r} ({node.name!r}) is tagged {tag!r}, but another method "
                "that is lowered with this one uses it, and would not see the delegate's "
                "changes: leave it untagged"
            )
        if spec.target in values:
            memory = memory or MemoryUse.of_program(program)
            _own_state(memory, node, tag, values[spec.target], groups, tag_of)
            owned.setdefault(tag, []).append(node)
        elif node in changing:
            raise OwnershipError(
                f"{spec.target!r} ({node.name!r}) is tagged {tag!r} as constant, but shares its "
                "memory with a buffer that the program changes: leave it untagged"
            )
        else:
            for owner in _owners(node, spec, tag, groups, tag_of):
                owned.setdefault(owner, []).append(node)
    return owned


def _owners(
    node: Node, spec: InputSpec, tag: str, groups: Groups, tag_of: Mapping[Node, str]
) -> list[str]:
    if not node.users:
        return [tag] if tag in groups else []
    readers = {tag_of.get(user) for user in node.users}
    if node.meta.get("no_copy") and len(readers) > 1:
        other = next(user for user in node.users if tag_of.get(user) != tag)
        raise OwnershipError(
            f"constant data node ({node.name}, {spec.target!r}) is tagged with ({tag}) but has "
            f"user ({other.name}) which has tag ({tag_of.get(other)}), and is marked no_copy: "
            "remove the mark (sharing does not copy), or leave it untagged"
        )
    return [reader for reader in groups if reader in readers]


def _own_state(
    memory: MemoryUse,
    node: Node,
    tag: str,
    value: object,
    groups: Groups,
    tag_of: dict[Node, str],
) -> None:
    if not isinstance(value, Node) or tag_of.get(value) != tag:
        where = tag_of.get(value) if isinstance(value, Node) else None
        raise OwnershipError(
            f"buffer {node.name!r} is tagged {tag!r}, but its new value {value} is computed "
            f"{f'by partition {where!r}' if where else 'outside of every partition'}: give the "
            "computation of the new value the same tag, or leave the buffer untagged"
        )
    # The call overwrites the buffer, so other readers need copies of its old value and views.
    last = node.graph.find_nodes(op="placeholder")[-1]
    inside: list[Node] = []
    for inner in (node, *groups[tag]):
        if inner is not node:
            inside.append(inner)
        # Elements of a list are separate nodes.
        fake = inner.meta.get("val")
        if memory.group(inner) is not memory.group(node) or not isinstance(fake, torch.Tensor):
            continue
        foreign = [user for user in inner.users if tag_of.get(user) != tag]
        if not foreign:
            continue
        with node.graph.inserting_after(last if inner is node else inner):
            old = node.graph.call_function(_clone_like(value), (inner,))
        old.meta = {"val": fake.detach().clone(), DELEGATION_TAG: tag}
        for reader in foreign:
            reader.replace_input_with(inner, old)
        inside.append(old)
        tag_of[old] = tag
    groups[tag][:] = inside


def _clone_like(value: Node) -> Any:
    """Return the clone operator in the dialect of ``value``'s own operator."""
    source = value.args[0] if find_schema(value.target) is None else value
    target = source.target if isinstance(source, Node) else value.target
    return clone_operator(target) or torch.ops.aten.clone.default
