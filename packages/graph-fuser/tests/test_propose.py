"""Proposals: fewest partitions, few border values, and a reason for each node left out."""

from __future__ import annotations

import itertools
import operator
import random

import pytest
import torch
from fuser_graphs import random_graph
from fuser_oracle import contracted, is_acyclic
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from lowerdeck.graph_fuser import Proposal, Reason, RegionError, propose_partitions
from lowerdeck_zoo.seeds import seeds

aten = torch.ops.aten


def names(proposal: Proposal) -> list[list[str]]:
    return [[node.name for node in part] for part in proposal]


def fewest(gm: GraphModule, wanted: list[Node]) -> int:
    """Return the least number of partitions, by trying all."""
    for count in range(1, len(wanted) + 1):
        for numbers in itertools.product(range(count), repeat=len(wanted)):
            parts = [
                [node for node, own in zip(wanted, numbers, strict=True) if own == number]
                for number in range(count)
            ]
            if is_acyclic(contracted(gm.graph, [part for part in parts if part])):
                return count
    return 0


def test_the_number_is_the_least_by_trying_all() -> None:
    for seed in seeds(40):
        rng = random.Random(seed)
        graph = Graph()
        values: list[Node] = [graph.placeholder("x")]
        for _ in range(9):
            pair = (rng.choice(values[-4:]), rng.choice(values))
            values.append(graph.call_function(aten.add.Tensor, pair))
        graph.output(values[-1])
        gm = GraphModule(torch.nn.Module(), graph)
        wanted = rng.sample(values[1:], k=6)
        members = set(wanted)
        proposal = propose_partitions(gm, members.__contains__)
        assert len(proposal) == fewest(gm, wanted)


def test_all_or_nothing_is_supported() -> None:
    gm = random_graph(1, 30)
    proposal = propose_partitions(gm, lambda node: True)
    assert len(proposal) == 1
    assert {left.reason for left in proposal.left_out.values()} == {Reason.NOT_COMPUTED}
    assert propose_partitions(gm, lambda node: False).partitions == ()


@pytest.mark.parametrize(
    ("refused", "groups", "min_nodes", "partitions", "left_out", "why"),
    [
        ("neg", [], 2, ["sin cos"], "exp", (Reason.TOO_SMALL, "1 computing nodes")),
        ("neg", ["cos neg"], 1, ["sin", "exp"], "cos", (Reason.GROUP_NOT_SUPPORTED, "neg")),
        ("cos", ["sin neg"], 1, ["exp"], "sin", (Reason.GROUP_IN_CYCLE, "sin")),
        ("", ["sin neg", "cos exp"], 1, ["sin cos neg exp"], "x", (Reason.NOT_COMPUTED, "x")),
    ],
)
def test_groups_stay_whole_or_are_left_out_and_small_partitions_too(
    refused: str,
    groups: list[str],
    min_nodes: int,
    partitions: list[str],
    left_out: str,
    why: tuple[Reason, str],
) -> None:
    gm = symbolic_trace(lambda x: x.sin().cos().neg().exp())
    n = {node.name: node for node in gm.graph.nodes}
    wanted = [[n[name] for name in group.split()] for group in groups]
    proposal = propose_partitions(
        gm, lambda node: node.name != refused, groups=wanted, min_nodes=min_nodes
    )
    assert names(proposal) == [part.split() for part in partitions]
    found = proposal.left_out[n[left_out]]
    assert found.reason is why[0]
    assert why[1] in found.detail


def test_elements_follow_their_producer() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    split = graph.call_function(aten.split.Tensor, (x, 2))
    first = graph.call_function(operator.getitem, (split, 0))
    graph.output(graph.call_function(aten.neg.default, (first,)))
    gm = GraphModule(torch.nn.Module(), graph)
    refused = propose_partitions(gm, lambda node: node is not split)
    assert refused.left_out[first].reason is Reason.FOLLOWS_PRODUCER
    taken = propose_partitions(gm, lambda node: node is not first)
    assert first in taken.partitions[0]


def test_wrong_lists_have_their_own_errors() -> None:
    gm = symbolic_trace(lambda x: x.sin().cos())
    other = symbolic_trace(lambda x: x.sin())
    n = {node.name: node for node in gm.graph.nodes}
    stranger = next(node for node in other.graph.nodes if node.name == "sin")
    gone = gm.graph.call_function(torch.neg, (n["cos"],))
    gm.graph.erase_node(gone)
    with pytest.raises(RegionError):
        propose_partitions(gm, bool, groups=[[stranger]])
    with pytest.raises(RegionError):
        propose_partitions(gm, bool, groups=[[gone]])
    # Groups that meet are one.
    meeting = [[n["sin"], n["sin"]], [n["sin"], n["cos"]]]
    assert names(propose_partitions(gm, lambda _: True, groups=meeting)) == [["sin", "cos"]]
