"""Decisions of the partitioner that ``preprocess`` takes over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from lowerdeck.lowered_module import DECISION, DELEGATION_TAG
from lowerdeck.xnnpack.patterns import MatchedGraph, Replacement, replacements_of


@dataclass(frozen=True, slots=True)
class Decision:
    """Of a call: XNNPACK takes it.

    Attributes:
        calls: How many such calls the partition has.
        constants: How many constants these read.
        replacement: The whole call that ends with this one.
    """

    calls: int
    constants: int
    replacement: Replacement | None


def keep_decisions(graph: Graph, matched: MatchedGraph, constants: Collection[str]) -> None:
    """Leave on the tagged calls of a program what was decided for them.

    Args:
        matched: The graph with whole calls.
        constants: Names of the placeholders that no run changes.
    """
    partitions: dict[str, list[Node]] = {}
    for node in graph.nodes:
        node.meta.pop(DECISION, None)
        tag = node.meta.get(DELEGATION_TAG)
        if tag is not None and _is_call(node):
            partitions.setdefault(tag, []).append(node)
    replacements = replacements_of(matched, graph)
    for calls in partitions.values():
        if any(node.name in matched.open for node in calls):
            continue
        numbers = len(calls), _count_constants(calls, constants)
        for node in calls:
            node.meta[DECISION] = Decision(*numbers, replacements.get(node))


def decisions_of(graph: Graph, constants: Collection[str]) -> Mapping[Node, Decision]:
    """Return the decisions for a partition; none unless it is whole, with all its constants.

    They do not hold for parts of it: what was a constant may be given at run time.

    Args:
        constants: Names of the placeholders that no run changes.
    """
    # Placeholders have the metadata of the calls, in other partitions, whose results they are.
    calls = [node for node in graph.nodes if node.op == "call_function"]
    decisions = {node: node.meta[DECISION] for node in calls if DECISION in node.meta}
    found = {(decision.calls, decision.constants) for decision in decisions.values()}
    expected = (len(decisions), _count_constants(decisions, constants))
    return decisions if found == {expected} else {}


def _is_call(node: Node) -> bool:
    # Numbers may be computed outside, and assertions compute nothing.
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor | tuple | list)
    return node.op == "call_function" and is_tensor


def _count_constants(calls: Collection[Node], constants: Collection[str]) -> int:
    return len(
        {source for node in calls for source in node.all_input_nodes if source.name in constants}
    )
