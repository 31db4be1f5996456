"""Signatures of preserved module calls, renamed to the new graph's nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from torch.export import ModuleCallEntry
from torch.export.graph_signature import ConstantArgument
from torch.fx import Graph, Node

from lowerdeck.decompose.calls.memory import Value


class Calls:
    """The signatures of modules, and what became of the values that they name.

    torch looks each up by the node that it came from, which finds nothing where nobody reads the
    value, or where it is one of several that a call gave, and then it refuses its own result.

    Args:
        entries: The calls that the program records.
    """

    def __init__(self, entries: Sequence[ModuleCallEntry]) -> None:
        self._entries = entries
        self._became: dict[str, Node] = {}
        self._written: dict[str, Node] = {}

    def became(self, env: Mapping[Node, Any]) -> frozenset[Node]:
        """Note what became of each value; return the nodes that must stay, read or not.

        Args:
            env: The value of each node of the original graph.
        """
        inside = frozenset[str]().union(*(_named(one) for one in self._entries if one.fqn))
        named = inside.union(*map(_named, self._entries))
        kept = []
        for node, value in env.items():
            if node.name not in named or not isinstance(value, Node | Value):
                continue
            made = value if isinstance(value, Node) else value.node
            if isinstance(value, Value) and value.memory.generation:
                # It is not known as of which write: as torch does, it is looked up.
                self._written[node.name] = made
            else:
                self._became[node.name] = made
            if node.name in inside:
                kept.append(made)
        return frozenset(kept)

    def renamed(self, graph: Graph) -> list[ModuleCallEntry]:
        """Return the calls that the new program records.

        Args:
            graph: The new graph, without what nobody needs.
        """
        made_from = {
            history[-1].name: node.name
            for node in (graph.nodes if self._written else ())
            if (history := node.meta.get("from_node"))
        }
        names = {name: node.name for name, node in self._became.items()}
        for name, node in self._written.items():
            names[name] = made_from.get(name, node.name)
        return [_renamed(entry, names) for entry in self._entries]


def _named(entry: ModuleCallEntry) -> frozenset[str]:
    if entry.signature is None:
        return frozenset()
    arguments = (*entry.signature.inputs, *entry.signature.outputs)
    return frozenset(one.name for one in arguments if not isinstance(one, ConstantArgument))


def _renamed(entry: ModuleCallEntry, names: Mapping[str, str]) -> ModuleCallEntry:
    if entry.signature is None:
        return ModuleCallEntry(entry.fqn)

    def with_names(arguments: Sequence[Any]) -> list[Any]:
        found = [copy(argument) for argument in arguments]
        for argument in found:
            argument.name = names.get(argument.name, argument.name)
        return found

    signature = replace(
        entry.signature,
        inputs=with_names(entry.signature.inputs),
        outputs=with_names(entry.signature.outputs),
    )
    return ModuleCallEntry(entry.fqn, signature)
