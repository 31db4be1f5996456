"""Sizes: no recursion, work in proportion to the graph, one answer under every hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fuser_graphs import count_calls
from torch.fx import Graph, GraphModule, Node

from lowerdeck.graph_fuser import (
    CycleError,
    create_submodule_from_nodes,
    fuse_partitions,
    legalize_graph,
    propose_partitions,
    topo_sort,
    validate_partition,
)


def long_chain(size: int) -> tuple[GraphModule, list[Node]]:
    graph = Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(size):
        nodes.append(graph.call_function(torch.neg, (nodes[-1],)))
    graph.output(nodes[-1])
    return GraphModule(torch.nn.Module(), graph), nodes[1:]


def test_many_nodes_without_recursion() -> None:
    size = 5000
    gm, nodes = long_chain(size)
    assert topo_sort(nodes) == nodes
    assert legalize_graph(gm) is gm
    assert not validate_partition([nodes[0], nodes[-1]])
    with pytest.raises(CycleError) as caught:
        fuse_partitions(gm, {"p": [nodes[0], nodes[-1]]})
    assert len(caught.value.path) == size
    assert len(str(caught.value)) < 2000
    refused = set(nodes[::250])
    proposal = propose_partitions(gm, lambda node: node not in refused)
    assert len(proposal) == 20
    fuse_partitions(gm, proposal.named())
    assert len(gm.graph.nodes) == 2 + 40


def _fuse(size: int, count: int = 0) -> Callable[[], object]:
    gm, nodes = long_chain(size)
    step = size // (count or size // 20)
    parts = {f"p{i}": nodes[i + 1 : i + step] for i in range(0, size, step)}
    return lambda: fuse_partitions(gm, parts)


def _propose(size: int) -> Callable[[], object]:
    gm, nodes = long_chain(size)
    refused = set(nodes[::10])
    return lambda: propose_partitions(gm, lambda node: node not in refused)


def _nested_groups(size: int) -> Callable[[], object]:
    # All groups span one node, so that all are on one circle.
    gm, nodes = long_chain(2 * size + 1)
    groups = [[nodes[i], nodes[size + 1 + i]] for i in range(size)]
    return lambda: propose_partitions(gm, lambda node: node is not nodes[size], groups=groups)


def _groups_in_a_row(size: int) -> Callable[[], object]:
    gm, nodes = long_chain(3 * size)
    groups = [[nodes[i], nodes[i + 2]] for i in range(0, 3 * size, 3)]
    refused = set(nodes[1::3])
    return lambda: propose_partitions(gm, lambda node: node not in refused, groups=groups)


def _out_of_order(size: int) -> Callable[[], object]:
    # Chains of 20, so that work grows with the size alone.
    graph = Graph()
    values = [graph.placeholder("x")]
    for index in range(size):
        values.append(graph.call_function(torch.neg, (values[-1] if index % 20 else values[0],)))
    graph.output(tuple(values[20::20]))
    gm, refused = GraphModule(torch.nn.Module(), graph), set(values[::7])
    for index in range(5, size, 20):
        values[index].append(values[index - 1])

    def both() -> None:
        legalize_graph(gm)
        fuse_partitions(gm, propose_partitions(gm, lambda node: node not in refused).named())

    return both


def _one_submodule(size: int) -> Callable[[], object]:
    gm, nodes = long_chain(size)
    return lambda: create_submodule_from_nodes(gm, nodes[60:70], "t")


def _legal(size: int) -> Callable[[], object]:
    gm, _ = long_chain(size)
    return lambda: legalize_graph(gm)


@pytest.mark.parametrize(
    "work",
    [_fuse, _propose, _nested_groups, _groups_in_a_row, _out_of_order],
    ids=lambda work: work.__name__[1:],
)
def test_twice_the_graph_costs_twice_the_calls(
    work: Callable[[int], Callable[[], object]],
) -> None:
    count_calls(work(100))
    # Half of the groups on one circle give way at a time: one round more for twice as many.
    assert count_calls(work(800)) < 2.4 * count_calls(work(400))


def test_more_partitions_of_the_same_nodes_cost_hardly_more() -> None:
    count_calls(_fuse(200, 10))
    assert count_calls(_fuse(1000, 50)) < 1.7 * count_calls(_fuse(1000, 5))
    # One submodule, and a graph that is in order, cost a scan.
    for work, limit in ((_one_submodule, 6), (_legal, 2)):
        assert count_calls(work(2000)) - count_calls(work(1000)) <= 1000 * limit


PROGRAM = """
import random, sys
sys.path.insert(0, sys.argv[1])
from fuser_graphs import computing, moved, random_region, tied_graph
from lowerdeck.graph_fuser import *
from torch.fx.passes.operator_support import OperatorSupportBase

class Support(OperatorSupportBase):
    def is_node_supported(self, submodules, node):
        return node.op == "call_function" and sum(map(ord, node.name)) % 5 > 0

def propose(gm, rng, nodes, connected):
    groups = [rng.sample(nodes, k=2)]
    support = lambda node: Support().is_node_supported({}, node)
    proposal = propose_partitions(gm, support, groups=groups)
    print([(node.name, left.detail) for node, left in proposal.left_out.items()])
    for name, part in fuse_partitions(gm, proposal.named()).items():
        print(name, part.inputs, part.outputs, part.module.graph, part.module.code)

def plan(gm, rng, nodes, connected):
    nodes = computing(gm)
    regions = [random_region(rng, nodes[:30], "a", 0), random_region(rng, nodes[30:], "b", 0)]
    plan = plan_outline(gm, regions)
    print([plan.steps(region) for region in (None, *plan.regions)])
    for region, made in outline(gm, regions).items():
        print(region.name, made.inputs, made.outputs, made.module.graph)

def legalize(gm, rng, nodes, connected):
    legalize_graph(moved(gm, rng, 6))
    fuse_partitions(gm, {"p": rng.sample(nodes, k=8)})

def partition(gm, rng, nodes, connected):
    maker = CapabilityBasedPartitioner(gm, Support(), True)
    maker.skip_horizontal_fusion = connected
    print(maker.propose_partitions())
    maker.partition_and_fuse()

for seed in range(2):
    for work in (propose, plan, legalize, partition):
        rng = random.Random(seed)
        gm = tied_graph(rng, 60)
        nodes = [node for node in computing(gm) if node.op == "call_function"]
        try:
            work(gm, rng, nodes, seed % 2 == 0)
        except CycleError as error:
            print(error)
        print(gm.graph)
        print(gm.code)
"""


def test_the_answer_is_the_same_under_every_hash_seed() -> None:
    answers = set()
    for seed in ("0", "77"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, str(Path(__file__).parent)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        answers.add(done.stdout)
    (answer,) = answers
    assert "fused_0" in answer
    assert "create a dependency cycle" in answer
