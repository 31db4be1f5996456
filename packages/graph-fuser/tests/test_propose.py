"""Proposals: fewest partitions, few border values, and a reason for each node left out."""

from __future__ import annotations

import itertools
import operator
import random

import pytest
import torch
from fuser_graphs import random_graph
from fuser_oracle import border, contracted, is_acyclic
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner as TorchPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from lowerdeck.graph_fuser import (
    Proposal,
    Reason,
    RegionError,
    propose_partitions,
)
from lowerdeck_zoo.seeds import seeds

aten = torch.ops.aten


class Support(OperatorSupportBase):
    def __init__(self, refused: set[str]) -> None:
        self.refused = refused

    def is_node_supported(self, submodules: object, node: Node) -> bool:
        return node.op == "call_function" and node.name not in self.refused


def refused_names(gm: GraphModule, rng: random.Random) -> set[str]:
    """Return names to refuse; elements go with their producers, as both partitioners have it."""
    share = rng.choice([0.1, 0.2, 0.4])
    return {
        node.name
        for node in gm.graph.nodes
        if node.target is not operator.getitem and rng.random() < share
    } | {
        node.name
        for node in gm.graph.nodes
        if node.target is operator.getitem and node.args[0].target is operator.getitem
    }


def names(proposal: Proposal) -> list[list[str]]:
    return [[node.name for node in part] for part in proposal]


def test_as_few_partitions_as_torch_and_no_more_border_values_on_300_graphs() -> None:
    for seed in seeds(300):
        rng = random.Random(seed)
        gm = random_graph(seed, rng.choice([10, 20, 35]))
        refused = refused_names(gm, rng)
        for node in gm.graph.nodes:
            # torch assigns elements after it has merged, so that refused ones cost it partitions.
            if node.target is operator.getitem and node.args[0].name in refused:
                refused.add(node.name)
        support = Support(refused)
        peer = TorchPartitioner(gm, support, allows_single_node_partition=True)
        theirs = [list(part.nodes) for part in peer.propose_partitions()]
        ours = propose_partitions(gm, support, min_nodes=0)
        assert len(ours) == len(theirs)
        assert sum(map(len, ours)) == sum(map(len, theirs))
        assert border(ours) <= border(theirs)
        assert is_acyclic(contracted(gm.graph, ours.partitions))


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


def two_branches() -> GraphModule:
    return symbolic_trace(lambda x, y: (x.sin().cos(), y.neg()))


def test_min_nodes_leaves_small_partitions_out_and_says_so() -> None:
    gm = symbolic_trace(lambda x: x.sin().cos().tanh().neg())
    n = {node.name: node for node in gm.graph.nodes}
    proposal = propose_partitions(gm, lambda node: node.name != "tanh", min_nodes=2)
    assert names(proposal) == [["sin", "cos"]]
    assert proposal.left_out[n["neg"]].reason is Reason.TOO_SMALL
    assert "1 computing nodes" in proposal.left_out[n["neg"]].detail


def test_groups_stay_whole_or_are_left_out_with_the_reason() -> None:
    gm = symbolic_trace(lambda x: x.sin().cos().neg().exp().abs())
    n = {node.name: node for node in gm.graph.nodes}
    supported = {"sin", "cos", "exp", "abs"}
    proposal = propose_partitions(
        gm, lambda node: node.name in supported, groups=[[n["cos"], n["neg"]]]
    )
    assert names(proposal)[0] == ["sin"]
    assert proposal.left_out[n["cos"]].reason is Reason.GROUP_NOT_SUPPORTED
    assert "neg" in proposal.left_out[n["cos"]].detail


def test_a_group_that_would_need_its_own_result_is_left_out() -> None:
    gm = symbolic_trace(lambda x: x.sin().cos().neg())
    n = {node.name: node for node in gm.graph.nodes}
    proposal = propose_partitions(
        gm, lambda node: node.name != "cos", groups=[[n["sin"], n["neg"]]]
    )
    assert names(proposal) == []
    assert proposal.left_out[n["sin"]].reason is Reason.GROUP_IN_CYCLE


def test_groups_that_need_each_other_share_a_partition() -> None:
    gm = symbolic_trace(lambda x: x.sin().cos().neg().exp())
    n = {node.name: node for node in gm.graph.nodes}
    groups = [[n["sin"], n["neg"]], [n["cos"], n["exp"]]]
    assert names(propose_partitions(gm, lambda node: True, groups=groups)) == [
        ["sin", "cos", "neg", "exp"]
    ]


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


def test_every_node_left_out_has_a_reason_and_a_sentence() -> None:
    gm = random_graph(3, 30)
    before = str(gm.graph)
    proposal = propose_partitions(gm, lambda node: "mul" not in node.name)
    assert str(gm.graph) == before
    inside = {node for part in proposal for node in part}
    assert set(proposal.left_out) == set(gm.graph.nodes) - inside
    assert all(node.name in left.detail for node, left in proposal.left_out.items())


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
