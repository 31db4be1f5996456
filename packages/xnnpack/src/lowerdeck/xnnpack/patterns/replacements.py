"""Replacements that were matched in a program, as data that its partitions keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.fx import Graph, GraphModule, Node

from lowerdeck.torch_base import OpOverload
from lowerdeck.xnnpack.operators.contract import ASSERTION
from lowerdeck.xnnpack.patterns.pieces import Arguments, Prepared
from lowerdeck.xnnpack.patterns.rewriting import MatchedGraph, add_call, nodes_in


@dataclass(frozen=True, slots=True)
class Source:
    """A node that another depends on, found again in any copy of the graph.

    Attributes:
        path: The position of an input of that other node, then of an input of this input, ...
    """

    path: tuple[int, ...]

    def find(self, node: Node) -> Node:
        """Return the node that ``node`` depends on by the path."""
        for position in self.path:
            node = node.all_input_nodes[position]
        return node


@dataclass(frozen=True, slots=True)
class Replacement:
    """A whole call in place of some pieces.

    Attributes:
        op: The operator.
        arguments: Its arguments, in which nodes are sources of the last piece.
        pieces: The other pieces, likewise.
    """

    op: OpOverload
    arguments: Arguments
    pieces: tuple[Source, ...]


def replacements_of(matched: MatchedGraph, program: Graph) -> dict[Node, Replacement]:
    """Return the replacements of a graph by the last of their pieces in the program's graph.

    Args:
        program: The graph that was matched.
    """
    named = {node.name: node for node in program.nodes} if matched.sources else {}
    replacements = {}
    for call, sources in matched.sources.items():
        if sources and matched.is_new(call):
            last = named[call.name]
            arguments = _mapped(call.args, partial(_original, matched, named, call))
            pieces = [one for one in sources if one is not last and one.target is not ASSERTION]
            paths = _sources(last, {*pieces, *nodes_in(arguments)})
            replacements[last] = Replacement(
                call.target,  # type: ignore[arg-type]  # of a whole call
                _mapped(arguments, paths.__getitem__),
                tuple(paths[piece] for piece in pieces),
            )
    return replacements


def _original(
    matched: MatchedGraph, named: Mapping[str, Node], call: Node, argument: Node
) -> Node | Prepared:
    """Return the program's node for an argument of a whole call."""
    if matched.sources[argument] or not isinstance(argument.target, OpOverload):
        return named[argument.name]
    suffix = argument.name.removeprefix(f"{call.name}_")
    arguments = _mapped(argument.args, partial(_original, matched, named, call))
    return Prepared(argument.target, arguments, argument.meta["val"].dtype, suffix)


def replace_again(module: GraphModule, replacements: Mapping[Node, Replacement]) -> MatchedGraph:
    """Return a graph with replacements that were matched in the program it was cut out of.

    Args:
        module: The partition, which is not changed.
        replacements: By the last of their pieces in the partition.
    """
    if not replacements:
        return MatchedGraph(module.graph, {})
    place = {node: number for number, node in enumerate(module.graph.nodes)}
    replaced: dict[Node, list[Node]] = {}
    for last, replacement in replacements.items():
        inner = [source.find(last) for source in replacement.pieces]
        checks = (user for piece in inner for user in piece.users)
        pieces = {last, *inner, *(user for user in checks if user.target is ASSERTION)}
        replaced[last] = sorted(pieces, key=place.__getitem__)
    gone = {piece for pieces in replaced.values() for piece in pieces} - replaced.keys()
    graph, copies = Graph(owning_module=module), dict[Node, Node]()
    sources: dict[Node, tuple[Node, ...]] = {}
    for node in module.graph.nodes:
        if node in gone:
            continue
        if node in replacements:
            replacement = replacements[node]
            arguments = _mapped(replacement.arguments, partial(_copy_of, copies, node))
            new_nodes = add_call(graph, replacement.op, arguments, node.name)
            new_nodes[-1].meta = dict(node.meta)
        else:
            new_nodes = [graph.node_copy(node, copies.__getitem__)]
        copies[node] = new_nodes[-1]
        copies[node].name = node.name
        sources.update(dict.fromkeys(new_nodes, ()))
        sources[copies[node]] = tuple(replaced.get(node, [node]))
    return MatchedGraph(graph, sources)


def _copy_of(copies: Mapping[Node, Node], last: Node, source: Source) -> Node:
    return copies[source.find(last)]


def _sources(last: Node, wanted: Iterable[Node]) -> dict[Node, Source]:
    """Return how nodes are reached from the last piece, by way of each other."""
    missing, found = set(wanted), {last: Source(())}
    waiting = [last]
    for node in waiting:
        for position, source in enumerate(node.all_input_nodes):
            if source in missing:
                missing.remove(source)
                found[source] = Source((*found[node].path, position))
                waiting.append(source)
    return found


def _mapped(arguments: Iterable[Any], function: Callable[[Any], Any]) -> Arguments:
    """Return arguments with a function of each node or source, those of prepared ones too."""

    def mapped(argument: Any) -> Any:
        if isinstance(argument, Prepared):
            return replace(argument, arguments=_mapped(argument.arguments, function))
        return function(argument) if isinstance(argument, Node | Source) else argument

    return tuple(map(mapped, arguments))
