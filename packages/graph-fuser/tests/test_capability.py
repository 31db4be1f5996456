"""The partitioner class beside torch's."""

from __future__ import annotations

import operator
import random

import pytest
import torch
from fuser_graphs import example_inputs, random_graph
from torch.fx import GraphModule, Node
from torch.fx.passes.infra import partitioner as torch_partitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from lowerdeck.graph_fuser import CapabilityBasedPartitioner


class Support(OperatorSupportBase):
    def __init__(self, refused: set[str]) -> None:
        self.refused = refused

    def is_node_supported(self, submodules: object, node: Node) -> bool:
        return node.op == "call_function" and node.name not in self.refused


def refused(gm: GraphModule, rng: random.Random) -> Support:
    names = {node.name for node in gm.graph.nodes if rng.random() < 0.25}
    for node in gm.graph.nodes:
        if node.target is operator.getitem:
            names.discard(node.name)
            if node.args[0].name in names:
                names.add(node.name)
    return Support(names)


VIEWS = ["torch.ops.aten.neg.default", "torch.ops.aten.mul.Tensor"]


@pytest.mark.parametrize("single", [True, False])
def test_counts_and_members_equal_torch(single: bool) -> None:
    for seed in range(60):
        gm = random_graph(seed, 25)
        support = refused(gm, random.Random(seed))
        ours = CapabilityBasedPartitioner(gm, support, allows_single_node_partition=single)
        theirs = torch_partitioner.CapabilityBasedPartitioner(
            gm, support, allows_single_node_partition=single
        )
        mine, peer = ours.propose_partitions(), theirs.propose_partitions()
        assert all(isinstance(part, torch_partitioner.Partition) for part in mine)
        if single:
            assert len(mine) == len(peer)
            assert {n for part in mine for n in part.nodes} == {
                n for part in peer for n in part.nodes
            }


def test_an_allowed_operator_makes_a_partition_alone() -> None:
    gm = torch.fx.symbolic_trace(lambda x: torch.ops.aten.neg.default(x))  # noqa: PLW0108
    support = Support(set())
    assert CapabilityBasedPartitioner(gm, support).propose_partitions() == []
    alone = CapabilityBasedPartitioner(
        gm, support, allowed_single_node_partition_ops=["torch.ops.aten.neg.default"]
    )
    assert len(alone.propose_partitions()) == 1


def test_bookends_are_removed_as_torch_does() -> None:
    for seed in range(60):
        gm = random_graph(seed, 25)
        support = refused(gm, random.Random(seed))
        theirs = torch_partitioner.CapabilityBasedPartitioner(gm, support, True, VIEWS)
        ours = CapabilityBasedPartitioner(gm, support, True, VIEWS)
        peer = theirs.propose_partitions()
        mine = [torch_partitioner.Partition(part.id, list(part.nodes)) for part in peer]
        theirs.remove_bookend_non_compute_ops(peer)
        ours.remove_bookend_non_compute_ops(mine)
        assert [list(part.nodes) for part in mine] == [list(part.nodes) for part in peer]


def test_partition_and_fuse_computes_the_same() -> None:
    for seed in range(20):
        gm = random_graph(seed, 25)
        expected = gm(*example_inputs(gm))
        support = refused(gm, random.Random(seed))
        fused = CapabilityBasedPartitioner(gm, support, True).partition_and_fuse("part_")
        assert fused is gm
        for value, wanted in zip(gm(*example_inputs(gm)), expected, strict=True):
            torch.testing.assert_close(value, wanted)


def test_without_horizontal_fusion_parts_are_connected() -> None:
    gm = torch.fx.symbolic_trace(
        lambda x: (torch.ops.aten.neg.default(x), torch.ops.aten.sin.default(x))
    )
    support = Support(set())
    assert len(CapabilityBasedPartitioner(gm, support, True).propose_partitions()) == 1
    vertical = CapabilityBasedPartitioner(gm, support, True, skip_horizontal_fusion=True)
    assert len(vertical.propose_partitions()) == 2
