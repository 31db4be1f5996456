"""Rename signatures of preserved module calls to the new graph's nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.export import ModuleCallEntry
from torch.export.graph_signature import ConstantArgument
from torch.fx import Node

from lowerdeck.decompose.calls.memory import Value


def named_nodes(entries: Sequence[ModuleCallEntry], env: Mapping[Node, Any]) -> dict[str, Node]:
    """Return the new node of each value in the signatures, by old name.

    torch looks values up by ``from_node``, which fails for unused values and for elements of
    multi-output ops; torch then rejects its own program.

    Args:
        entries: Module calls of the program.
        env: Value of each original node.
    """
    named = {
        argument.name
        for entry in entries
        if entry.signature is not None
        for argument in (*entry.signature.inputs, *entry.signature.outputs)
        if not isinstance(argument, ConstantArgument)
    }
    return {
        node.name: value if isinstance(value, Node) else value.node
        for node, value in env.items()
        if node.name in named and isinstance(value, Node | Value)
    }


def renamed_entries(
    entries: Sequence[ModuleCallEntry], nodes: Mapping[str, Node]
) -> list[ModuleCallEntry]:
    """Return the preserved module calls of the new program.

    Args:
        entries: Module calls of the original program.
        nodes: Result of ``named_nodes``; names may have changed since.
    """
    names = {name: node.name for name, node in nodes.items()}

    def renamed(arguments: Sequence[Any]) -> list[Any]:
        return [replace(item, name=names.get(item.name, item.name)) for item in arguments]

    new_entries = []
    for entry in entries:
        signature = entry.signature
        if signature is not None:
            inputs, outputs = renamed(signature.inputs), renamed(signature.outputs)
            signature = replace(signature, inputs=inputs, outputs=outputs)
        new_entries.append(ModuleCallEntry(entry.fqn, signature))
    return new_entries
