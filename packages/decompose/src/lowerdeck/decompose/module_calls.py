"""Signatures of preserved module calls, renamed to the new graph's nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.export import ModuleCallEntry
from torch.export.graph_signature import ConstantArgument
from torch.fx import Node

from lowerdeck.decompose.calls.memory import Value


def named_nodes(entries: Sequence[ModuleCallEntry], env: Mapping[Node, Any]) -> dict[str, Node]:
    """Return the new node of each value that a signature names, by the name of the old one.

    torch finds a value by ``from_node``, which fails where nothing reads it, or where it is one of
    several results, and then torch refuses its own program.

    Args:
        entries: The calls that the program records.
        env: The value of each node of the original graph.
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
    """Return the preserved calls of the new program.

    Args:
        entries: Preserved calls of the original program.
        nodes: As ``named_nodes`` returns them; names may have changed since.
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
