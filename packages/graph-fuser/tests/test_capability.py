"""The partitioner class compared with torch's."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
from fuser_graphs import random_graph
from fuser_oracle import border, contracted, is_acyclic
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra import partitioner as torch_partitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from lowerdeck.graph_fuser import CapabilityBasedPartitioner, propose_partitions
from lowerdeck_zoo.seeds import NIGHTLY, seeds

aten = torch.ops.aten


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


def test_an_allowed_operator_makes_a_partition_alone() -> None:
    gm = torch.fx.symbolic_trace(lambda x: torch.ops.aten.neg.default(x))  # noqa: PLW0108
    support = Support(set())
    assert CapabilityBasedPartitioner(gm, support).propose_partitions() == []
    alone = CapabilityBasedPartitioner(
        gm, support, allowed_single_node_partition_ops=["torch.ops.aten.neg.default"]
    )
    assert len(alone.propose_partitions()) == 1


def names(parts: list[torch_partitioner.Partition]) -> list[list[str]]:
    return [[node.name for node in part.nodes] for part in parts]


def both(
    gm: GraphModule, support: OperatorSupportBase, **options: Any
) -> tuple[list[torch_partitioner.Partition], list[torch_partitioner.Partition]]:
    """Return what ours and what torch's class proposes."""
    ours = CapabilityBasedPartitioner(gm, support, **options)
    theirs = torch_partitioner.CapabilityBasedPartitioner(gm, support, **options)
    return ours.propose_partitions(), theirs.propose_partitions()


def test_nodes_come_with_their_position_and_partitions_last_first_as_from_torch() -> None:
    alike = equal = 0
    for seed in seeds(80):
        gm = random_graph(seed, 25)
        mine, peer = both(gm, refused(gm, random.Random(seed)), allows_single_node_partition=True)
        known = {node: position for part in peer for node, position in part.nodes.items()}
        for part in mine:
            assert list(part.nodes.items()) == [(node, known[node]) for node in part.nodes]
            assert names([part])[0] == [n.name for n in gm.graph.nodes if n in part.nodes]
        if len(mine) > 1 and sorted(names(mine)) == sorted(names(peer)):
            alike += 1
            equal += names(mine) == names(peer)
            assert names(mine) != names(peer)[::-1]
    # Of two that torch merges the larger gives its number, so that a few are elsewhere there.
    assert not NIGHTLY or equal > 0.8 * alike > 8, (equal, alike)


def test_an_override_of_is_node_supported_is_asked() -> None:
    gm = random_graph(2, 30)
    support = refused(gm, random.Random(2))

    def partitioners(base: Any) -> Any:
        class NoSine(base):  # type: ignore[misc]
            def _is_node_supported(self, node: Node) -> bool:
                return node.target is not aten.sin.default and super()._is_node_supported(node)

        return NoSine(gm, support, allows_single_node_partition=True)

    ours = partitioners(CapabilityBasedPartitioner).propose_partitions()
    theirs = partitioners(torch_partitioner.CapabilityBasedPartitioner).propose_partitions()
    assert {n for part in ours for n in part.nodes} == {n for part in theirs for n in part.nodes}
    assert len(ours) == len(theirs)
    assert not any(node.target is aten.sin.default for part in ours for node in part.nodes)


def test_a_support_that_takes_anything_never_sees_inputs_or_output_in_a_partition() -> None:
    class Anything(OperatorSupportBase):
        def is_node_supported(self, submodules: object, node: Node) -> bool:
            return True

    gm = torch.fx.symbolic_trace(lambda x: (x + 1).relu())
    partitioner = CapabilityBasedPartitioner(gm, Anything(), True)
    assert names(partitioner.propose_partitions()) == [["add", "relu"]]
    torch.testing.assert_close(
        partitioner.partition_and_fuse()(torch.ones(1)), torch.full((1,), 2.0)
    )


def additions(seed: int, size: int) -> GraphModule:
    """Return a graph in which each node reads any two before it."""
    rng = random.Random(seed)
    graph = Graph()
    values = [graph.placeholder("x")]
    reach = rng.choice([3, 8, size])
    for _ in range(size):
        pair = (rng.choice(values[-reach:]), rng.choice(values[-reach:]))
        values.append(graph.call_function(aten.add.Tensor, pair))
    graph.output(tuple(value for value in values if not value.users))
    return GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("vertical", [True, False])
def test_never_more_partitions_than_torch_makes(vertical: bool) -> None:
    for seed in seeds(400):
        rng = random.Random(seed)
        size = rng.choice([4, 6, 8, 10, 20, 35, 60])
        gm = additions(seed, size) if seed % 2 else random_graph(seed, size)
        support = refused(gm, rng)
        options = {"skip_horizontal_fusion": vertical}
        mine, peer = both(gm, support, allows_single_node_partition=True, **options)
        assert is_acyclic(contracted(gm.graph, [list(part.nodes) for part in mine]))
        if not is_acyclic(contracted(gm.graph, [list(part.nodes) for part in peer])):
            # torch proposes what cannot be fused now and then.
            continue
        assert len(mine) <= len(peer), seed
        if len(mine) == len(peer) and not vertical:
            assert len(propose_partitions(gm, support, min_nodes=0)) == len(mine)
            assert border(part.nodes for part in mine) <= border(part.nodes for part in peer), seed
        mine, peer = both(gm, support, **options)
        if len(mine) > len(peer):
            # Where what is small is dropped, torch may drop more of them: it fuses fewer nodes.
            assert sum(map(size_of, mine)) > sum(map(size_of, peer)), seed


def size_of(partition: torch_partitioner.Partition) -> int:
    return len(partition.nodes)
