"""Partitioner decisions that ``preprocess`` reuses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from lowerdeck.lowered_module import DECISION, DELEGATION_TAG, foldable_nodes
from lowerdeck.xnnpack.operators.table import refusal
from lowerdeck.xnnpack.patterns import MatchedGraph, match_patterns


class Decision(NamedTuple):
    """Record that XNNPACK supports a call.

    Attributes:
        calls: Number of supported calls in the partition.
        constants: Number of constants that the calls read.
        patterns: Indices of patterns whose match ends with this call.
    """

    calls: int
    constants: int
    patterns: tuple[int, ...]


def restore_supported(
    program: ExportedProgram,
    constants: Collection[str],
    kept: Collection[str] | None = None,
    decisions: Mapping[Node, Decision] = MappingProxyType({}),
) -> MatchedGraph:
    """Return a program's graph in which decomposed operators that XNNPACK supports are restored.

    Args:
        constants: Names of constant placeholders.
        kept: Names of the calls that may be constant-folded; None for all.
        decisions: Decisions from :func:`decisions_of`; if empty, each match is checked.
    """
    if decisions:
        patterns = {
            node.name: decision.patterns
            for node, decision in decisions.items()
            if decision.patterns
        }
        return match_patterns(program.graph_module, lambda _: True, patterns)

    @cache
    def ahead() -> Collection[str]:
        nodes = [node for node in program.graph.nodes if kept is None or node.name in kept]
        return {*constants, *(node.name for node in foldable_nodes(nodes, constants))}

    def accepts(node: Node) -> bool:
        return refusal(node, ahead()) is None

    return match_patterns(program.graph_module, accepts)


def keep_decisions(graph: Graph, matched: MatchedGraph, constants: Collection[str]) -> None:
    """Store the partitioner's decisions in the metadata of the tagged calls.

    Args:
        matched: The graph with restored operators.
        constants: Names of constant placeholders.
    """
    partitions: dict[str, list[Node]] = {}
    for node in graph.nodes:
        node.meta.pop(DECISION, None)
        tag = node.meta.get(DELEGATION_TAG)
        if tag is not None and _is_call(node):
            partitions.setdefault(tag, []).append(node)
    for calls in partitions.values():
        if any(node.name in matched.postponed for node in calls):
            continue
        numbers = len(calls), _count_constants(calls, constants)
        for node in calls:
            node.meta[DECISION] = Decision(*numbers, tuple(matched.numbers.get(node.name, ())))


def decisions_of(graph: Graph, constants: Collection[str]) -> Mapping[Node, Decision]:
    """Return the decisions for a complete partition, none for a part of one.

    In a part, constants may have become run-time inputs.

    Args:
        constants: Names of constant placeholders.
    """
    # Placeholders have the metadata of their producers in other partitions.
    calls = [node for node in graph.nodes if node.op == "call_function"]
    decisions = {node: node.meta[DECISION] for node in calls if DECISION in node.meta}
    partition_counts = {(decision.calls, decision.constants) for decision in decisions.values()}
    expected = (len(decisions), _count_constants(decisions, constants))
    return decisions if partition_counts == {expected} else {}


def _is_call(node: Node) -> bool:
    # Numbers may be computed outside of the partition, and assertions are ignored.
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor | tuple | list)
    return node.op == "call_function" and is_tensor


def _count_constants(calls: Collection[Node], constants: Collection[str]) -> int:
    return len(
        {source for node in calls for source in node.all_input_nodes if source.name in constants}
    )
