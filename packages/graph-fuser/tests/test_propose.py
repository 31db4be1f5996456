"""Proposals: fewest partitions, few border values, and a reason for each node left out."""

from __future__ import annotations

import itertools
import operator
import random

import pytest
import torch
from fuser_graphs import random_graph, tied_graph
from fuser_oracle import border, contracted, is_acyclic, reaches
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner as TorchPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from lowerdeck.graph_fuser import (
    DuplicateNodeError,
    ErasedNodeError,
    ForeignNodeError,
    OverlapError,
    Proposal,
    Reason,
    RegionError,
    fuse_partitions,
    propose_partitions,
)
from lowerdeck.graph_fuser.order.hazards import order_hazards
from lowerdeck.torch_base import is_getitem
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


def test_connected_only_splits_what_exchanges_no_value() -> None:
    gm = two_branches()
    assert names(propose_partitions(gm, lambda node: True)) == [["sin", "cos", "neg"]]
    split = propose_partitions(gm, lambda node: True, connected_only=True)
    assert names(split) == [["sin", "cos"], ["neg"]]


def test_min_nodes_leaves_small_partitions_out_and_says_so() -> None:
    gm = two_branches()
    n = {node.name: node for node in gm.graph.nodes}
    proposal = propose_partitions(gm, lambda node: True, connected_only=True, min_nodes=2)
    assert names(proposal) == [["sin", "cos"]]
    assert proposal.left_out[n["neg"]].reason is Reason.TOO_SMALL
    assert "1 computing nodes" in proposal.left_out[n["neg"]].detail


@pytest.mark.parametrize("op", [aten.view.default, "torch.ops.aten.view.default"])
def test_non_compute_ops_do_not_count(op: object) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.view.default, (x, [4])))
    gm = GraphModule(torch.nn.Module(), graph)
    assert len(propose_partitions(gm, lambda node: True)) == 1
    assert len(propose_partitions(gm, lambda node: True, non_compute_ops=[op])) == 0


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


def test_keep_apart_separates() -> None:
    gm = two_branches()
    n = {node.name: node for node in gm.graph.nodes}
    proposal = propose_partitions(gm, lambda node: True, keep_apart=[[n["neg"], n["sin"]]])
    assert len(proposal) == 2
    number_of = {node.name: number for number, part in enumerate(proposal) for node in part}
    assert number_of["sin"] != number_of["neg"]


def test_keep_apart_holds_on_random_graphs() -> None:
    for seed in seeds(60):
        rng = random.Random(seed)
        gm = random_graph(seed, 30)
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        nodes = [node for node in nodes if node.target is not operator.getitem]
        apart = [rng.sample(nodes, k=3), rng.sample(nodes, k=2)]
        proposal = propose_partitions(gm, lambda node: True, keep_apart=apart)
        for part in proposal:
            assert all(sum(node in part for node in members) <= 1 for members in apart)
        assert is_acyclic(contracted(gm.graph, proposal.partitions))


def test_connected_parts_are_connected_apart_and_can_be_fused() -> None:
    for seed in seeds(150):
        rng = random.Random(seed)
        gm = tied_graph(rng, rng.randint(4, 60))
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        nodes = [node for node in nodes if not is_getitem(node)]
        apart = [rng.sample(nodes, k=min(len(nodes), 3))] if rng.random() < 0.5 else []
        taken = {node for node in gm.graph.nodes if rng.random() < 0.7}
        proposal = propose_partitions(
            gm,
            taken.__contains__,
            connected_only=True,
            keep_apart=apart,
            min_nodes=0,
        )
        hazards = order_hazards(gm.graph, gm)
        assert is_acyclic(contracted(gm.graph, proposal.partitions, hazards)), seed
        near: dict[Node, list[Node]] = {node: [] for node in gm.graph.nodes}
        for first, second in [*((s, n) for n in near for s in n.all_input_nodes), *hazards]:
            near[first].append(second)
            near[second].append(first)
        for part in proposal:
            assert all(sum(node in part for node in members) <= 1 for members in apart)
            within = {node: [n for n in near[node] if n in set(part)] for node in part}
            assert reaches(part[:1], within) == set(part), seed
        fuse_partitions(gm, proposal.named())
        gm.graph.lint()


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


def test_a_graph_out_of_order_is_understood() -> None:
    gm = symbolic_trace(lambda x: x.sin().cos().neg())
    n = {node.name: node for node in gm.graph.nodes}
    n["neg"].append(n["sin"])
    assert names(propose_partitions(gm, lambda node: node.name != "cos")) == [["sin"], ["neg"]]


def test_wrong_lists_have_their_own_errors() -> None:
    gm = symbolic_trace(lambda x: x.sin().cos())
    other = symbolic_trace(lambda x: x.sin())
    n = {node.name: node for node in gm.graph.nodes}
    stranger = next(node for node in other.graph.nodes if node.name == "sin")
    gone = gm.graph.call_function(torch.neg, (n["cos"],))
    gm.graph.erase_node(gone)
    with pytest.raises(ForeignNodeError):
        propose_partitions(gm, bool, groups=[[stranger]])
    with pytest.raises(ErasedNodeError):
        propose_partitions(gm, bool, keep_apart=[[gone]])
    with pytest.raises(DuplicateNodeError):
        propose_partitions(gm, bool, groups=[[n["sin"], n["sin"]]])
    with pytest.raises(OverlapError):
        propose_partitions(gm, bool, groups=[[n["sin"]], [n["sin"], n["cos"]]])
    both = [n["sin"], n["cos"]]
    with pytest.raises(RegionError, match="hold together"):
        propose_partitions(gm, lambda node: True, groups=[both], keep_apart=[both])
