"""Restore decomposed operators in a program's graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch.fx import Graph, GraphModule, Node

from lowerdeck.torch_base import OpOverload, copy_graph, schema_of
from lowerdeck.xnnpack.operators.contract import ASSERTION
from lowerdeck.xnnpack.patterns.attention import ATTENTION, GROUPS
from lowerdeck.xnnpack.patterns.functions import FUNCTIONS, NORMS
from lowerdeck.xnnpack.patterns.integer_layers import INTEGER_LAYERS
from lowerdeck.xnnpack.patterns.matching import Match, is_empty, is_possible, matches
from lowerdeck.xnnpack.patterns.movements import JOINS, SHUFFLES
from lowerdeck.xnnpack.patterns.pieces import Arguments, OperatorPattern, Prepared
from lowerdeck.xnnpack.patterns.products import LAYERS, PRODUCTS

_STAGES: tuple[tuple[OperatorPattern, ...], ...] = (
    INTEGER_LAYERS,
    (*PRODUCTS, *FUNCTIONS, *NORMS, *SHUFFLES, *JOINS),
    (*LAYERS, *ATTENTION),
    GROUPS,
)
"""Stages of patterns; later ones may match calls restored by earlier ones."""
Accepts = Callable[[Node], bool]
PatternIndices = Mapping[str, Collection[int]]
"""Indices of matching patterns, by name of the match's last node."""
_ByLast = Mapping[object, Sequence[tuple[int, OperatorPattern]]]
"""Patterns with their indices, by the target of their last call."""


@dataclass(frozen=True, slots=True)
class MatchedGraph:
    """A graph with restored operators.

    Attributes:
        graph: The program's graph if nothing matched, else a copy.
        sources: For each node of a copy, the program's nodes that it replaces, in order; empty for
            a node that prepares an argument.
        numbers: Indices of the patterns that matched, by the name of the restored call.
        postponed: Names of the last nodes of matches that read sizes computed between their calls.
            In a partition such sizes are inputs, so that the match may succeed there.
    """

    graph: Graph
    sources: dict[Node, tuple[Node, ...]] = field(default_factory=dict)
    numbers: dict[str, list[int]] = field(default_factory=dict)
    postponed: set[str] = field(default_factory=set)

    def sources_of(self, node: Node) -> tuple[Node, ...]:
        """Return the program's nodes that a node replaces."""
        return self.sources.get(node, (node,))

    def is_new(self, node: Node) -> bool:
        """Return whether a call was added by matching."""
        sources = self.sources_of(node)
        return len(sources) != 1 or sources[0].target is not node.target


def match_patterns(
    module: GraphModule, accepts: Accepts, decided: PatternIndices | None = None
) -> MatchedGraph:
    """Return a program's graph with decomposed operators restored.

    Args:
        module: The program, which is not changed.
        accepts: Returns whether XNNPACK supports a restored call.
        decided: For a partition, the patterns that matched in the whole program; None tries all
            patterns.

    Returns:
        The graph. A restored call has the name of the last node that it replaces.
    """
    values = [node.meta.get("val") for node in module.graph.nodes]
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    stages = _possible_stages({*(node.target for node in module.graph.nodes), *dtypes})
    if not any(_may_end_pattern(node, stages, decided) for node in module.graph.nodes):
        return MatchedGraph(module.graph)
    matched = _copy_graph(module)
    for stage in filter(None, stages):
        _recognise(matched, stage, accepts, decided)
    return matched


def _possible_stages(targets: set[object]) -> list[_ByLast]:
    """Return the patterns of each stage whose operators occur in the graph."""
    stages: list[_ByLast] = []
    numbers = count()
    for stage in _STAGES:
        by_last: dict[object, list[tuple[int, OperatorPattern]]] = {}
        restored_ops = set[object]()
        for pattern in stage:
            number = next(numbers)
            if is_possible(pattern.pieces, targets):
                restored_ops.add(pattern.op)
                for op in pattern.pieces.ops:
                    by_last.setdefault(op, []).append((number, pattern))
        stages.append(by_last)
        targets = targets | restored_ops
    return stages


def _may_end_pattern(
    node: Node, stages: Sequence[_ByLast], decided: PatternIndices | None
) -> bool:
    """Return whether some pattern may end with a node."""
    if decided is not None:
        return node.name in decided
    return node.op == "call_function" and any(
        _first_match(candidate, node) is not None
        for stage in stages
        for _, candidate in stage.get(node.target, ())
    )


def _copy_graph(module: GraphModule) -> MatchedGraph:
    graph, copies = copy_graph(module.graph)
    graph.owning_module = module
    return MatchedGraph(graph, {copy: (node,) for node, copy in copies.items()})


def _recognise(
    matched: MatchedGraph, patterns: _ByLast, accepts: Accepts, decided: PatternIndices | None
) -> None:
    """Replace matches backwards from the end of the graph."""
    survey = _Survey(matched.graph)
    for node in reversed(list(matched.graph.nodes)):
        last_call: Node | None = node
        # The restored call may end another match.
        while last_call is not None and last_call in survey.place:
            possible = patterns.get(last_call.target, ())
            if decided is not None:
                numbers = decided.get(node.name, ())
                possible = [pair for pair in possible if pair[0] in numbers]
            last_call = _replace(matched, possible, last_call, survey, accepts)


def _replace(
    matched: MatchedGraph,
    patterns: Sequence[tuple[int, OperatorPattern]],
    node: Node,
    survey: _Survey,
    accepts: Accepts,
) -> Node | None:
    """Replace the match that ends with a node, and return the restored call."""
    graph, sources = matched.graph, matched.sources
    for number, pattern in patterns:
        match, arguments = _first_match(pattern, node) or (None, None)
        if match is None or arguments is None:
            continue
        checks = (user for piece in match.pieces[1:] for user in piece.users)
        matched_nodes = {*match.pieces, *(user for user in checks if user.target is ASSERTION)}
        pieces = sorted(matched_nodes, key=survey.place.__getitem__)
        if not survey.can_be_joined(pieces, _nodes_in(arguments)):
            matched.postponed.add(node.name)
            continue
        with graph.inserting_before(node):
            new_nodes = _add_call(graph, pattern.op, arguments, node.name)
        new_nodes[-1].meta = dict(node.meta)
        if not all(map(accepts, new_nodes)):
            for new_node in reversed(new_nodes):
                graph.erase_node(new_node)
            continue
        node.replace_all_uses_with(new_nodes[-1])
        survey.replace(pieces, new_nodes[-1])
        for piece in reversed(pieces):
            graph.erase_node(piece)
        new_nodes[-1].name = node.name
        sources.update(dict.fromkeys(new_nodes, ()))
        sources[new_nodes[-1]] = tuple(source for piece in pieces for source in sources.pop(piece))
        matched.numbers.setdefault(node.name, []).append(number)
        return new_nodes[-1]
    return None


def _add_call(graph: Graph, op: OpOverload, arguments: Arguments, name: str) -> list[Node]:
    """Add the calls of prepared arguments, then the call; return all."""
    calls: list[Node] = []
    for argument in arguments:
        if isinstance(argument, Prepared):
            call = graph.call_function(argument.op, argument.arguments)
            call.name, call.meta["val"] = f"{name}_{argument.name}", _value(argument)
            calls.append(call)
    prepared = iter(calls)
    operands = tuple(
        next(prepared) if isinstance(argument, Prepared) else argument for argument in arguments
    )
    schema = schema_of(op).arguments
    keywords = [argument.name for argument in schema if argument.kwarg_only]
    count = len(schema) - len(keywords)
    named = dict(zip(keywords, operands[count:], strict=False))
    return [*calls, graph.call_function(op, operands[:count], named)]


def _value(argument: Prepared) -> torch.Tensor:
    source: torch.Tensor = argument.arguments[0].meta["val"]
    return source.new_empty(source.shape, dtype=argument.dtype, device="meta")


def _nodes_in(arguments: Arguments) -> Iterator[Node]:
    for argument in arguments:
        if isinstance(argument, Prepared):
            yield from _nodes_in(argument.arguments)
        elif isinstance(argument, Node):
            yield argument


def _first_match(whole: OperatorPattern, node: Node) -> tuple[Match, Arguments] | None:
    for match in matches(whole.pieces, node):
        arguments = whole.arguments(match)
        if arguments is not None:
            return match, arguments
    return None


class _Survey:
    """Positions and side effects of all nodes of the original graph."""

    def __init__(self, graph: Graph) -> None:
        self.place: dict[Node, int] = {}
        self._writes: list[int] = []
        self._writers: set[Node] = set()
        self._early: set[Node] = set()
        count = 0
        for number, node in enumerate(graph.nodes):
            self.place[node] = number
            if _may_write(node):
                count += 1
                self._writers.add(node)
            self._writes.append(count)
            sources = node.all_input_nodes
            if not isinstance(node.meta.get("val"), torch.Tensor) and all(
                source.op == "placeholder" or source in self._early for source in sources
            ):
                self._early.add(node)

    def can_be_joined(self, pieces: Sequence[Node], arguments: Iterable[Node]) -> bool:
        """Return whether all calls of a match can be moved to the position of the last.

        This requires that no other node mutates a tensor between them. In addition to
        ``arguments`` they may read only sizes of inputs and empty tensors: sizes of results of the
        same delegate would be needed before it runs.
        """
        first, last = (self._writes[self.place[operand]] for operand in (pieces[0], pieces[-1]))
        first += sum(operand in self._writers for operand in pieces[1:])
        available = {*pieces, *arguments}
        return first == last and all(
            operand in available or operand in self._early or is_empty(operand)
            for node in pieces
            for operand in node.all_input_nodes
        )

    def replace(self, pieces: Sequence[Node], replacement: Node) -> None:
        """Record that a node replaces others at the position of the last."""
        self.place[replacement] = self.place[pieces[-1]]
        for piece in pieces:
            del self.place[piece]


def _may_write(node: Node) -> bool:
    """Return whether a node may mutate a tensor that earlier nodes read."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if isinstance(node.target, OpOverload):
        return schema_of(node.target).is_mutable
    return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
