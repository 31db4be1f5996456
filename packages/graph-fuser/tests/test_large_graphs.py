"""Sizes: no recursion, work in proportion, the same answer under every hash seed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from lowerdeck.graph_fuser import (
    CycleError,
    create_submodule_from_nodes,
    fuse_partitions,
    inline_submodule,
    legalize_graph,
    propose_partitions,
    topo_sort,
    validate_partition,
)
from lowerdeck.graph_fuser._torch_private import lazy_graph_module
from lowerdeck.graph_fuser.order.hazards import order_hazards
from lowerdeck.torch_base import Behaviours


def long_chain(size: int) -> tuple[GraphModule, list[Node]]:
    graph = Graph()
    value = graph.placeholder("x")
    nodes: list[Node] = []
    for _ in range(size):
        value = Node(graph, f"n{len(nodes)}", "call_function", torch.neg, (value,), {})
        graph._root.prepend(value)
        graph._find_nodes_lookup_table.insert(value)
        graph._len += 1
        nodes.append(value)
    graph.output(value)
    return lazy_graph_module("Chain", graph), nodes


def test_a_hundred_thousand_nodes_without_recursion() -> None:
    size = 100_000
    gm, nodes = long_chain(size)
    assert topo_sort(nodes) == nodes
    assert legalize_graph(gm) is gm
    assert not validate_partition([nodes[0], nodes[-1]])
    with pytest.raises(CycleError) as caught:
        fuse_partitions(gm, {"p": [nodes[0], nodes[-1]]})
    assert len(caught.value.path) == size
    assert len(str(caught.value)) < 2000
    proposal = propose_partitions(gm, lambda node: int(node.name[1:]) % 1000 != 0)
    assert len(proposal) == 100
    fused = fuse_partitions(gm, proposal.named())
    assert len(gm.graph.nodes) == 2 + 200
    inline_submodule(gm, fused["fused_7"].call_node)
    assert len(gm.graph.nodes) == 2 + 199 + 999


def calls(action: Callable[[], object]) -> int:
    """Return how many Python and C functions ``action`` called."""
    count = 0

    def count_call(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(count_call)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def test_twice_the_graph_and_partitions_cost_twice_the_calls() -> None:
    def cost(size: int, count: int) -> int:
        gm, nodes = long_chain(size)
        step = size // count
        parts = {f"p{i}": nodes[i * step + 1 : (i + 1) * step] for i in range(count)}
        return calls(lambda: fuse_partitions(gm, parts))

    cost(100, 10)
    assert cost(4000, 200) < 2.3 * cost(2000, 100)


def test_more_partitions_of_the_same_nodes_cost_hardly_more() -> None:
    def cost(count: int) -> int:
        gm, nodes = long_chain(4000)
        step = 4000 // count
        parts = {f"p{i}": nodes[i * step + 1 : (i + 1) * step] for i in range(count)}
        return calls(lambda: fuse_partitions(gm, parts))

    cost(10)
    assert cost(100) < 1.7 * cost(10)


def test_one_submodule_costs_its_partition_and_a_scan() -> None:
    def cost(size: int) -> int:
        gm, nodes = long_chain(size)
        return calls(lambda: create_submodule_from_nodes(gm, nodes[100:110], "t"))

    cost(500)
    # Per node of the whole graph no more than the calls of one scan.
    assert (cost(8000) - cost(4000)) / 4000 < 6


def test_twice_the_graph_costs_a_proposal_twice_the_calls() -> None:
    def cost(size: int) -> int:
        gm, _ = long_chain(size)
        return calls(lambda: propose_partitions(gm, lambda node: node.name[-1] != "0"))

    cost(100)
    assert cost(8000) < 2.2 * cost(4000)


def test_twice_the_graph_costs_connected_partitions_twice_the_calls() -> None:
    def cost(size: int) -> int:
        rng = random.Random(0)
        graph = Graph()
        values = [graph.placeholder("x")]
        for _ in range(size):
            # Long edges past what is left out: each asks whether two parts can be one.
            pair = (values[-1], rng.choice(values[-100:]))
            values.append(graph.call_function(torch.ops.aten.add.Tensor, pair))
        graph.output(values[-1])
        gm = GraphModule(torch.nn.Module(), graph)
        refused = set(rng.sample(values, k=size // 10))
        return calls(
            lambda: propose_partitions(gm, lambda node: node not in refused, connected_only=True)
        )

    cost(100)
    assert cost(4000) < 2.3 * cost(2000)


@pytest.mark.parametrize("nested", [False, True])
def test_twice_the_groups_on_circles_cost_little_more_than_twice_the_calls(nested: bool) -> None:
    def cost(count: int) -> int:
        if nested:
            # All groups span one node, so that all are on one circle.
            gm, nodes = long_chain(2 * count + 1)
            groups = [[nodes[i], nodes[count + 1 + i]] for i in range(count)]
            refused = {nodes[count]}
        else:
            gm, nodes = long_chain(3 * count)
            groups = [[nodes[i], nodes[i + 2]] for i in range(0, 3 * count, 3)]
            refused = set(nodes[1::3])
        return calls(
            lambda: propose_partitions(gm, lambda node: node not in refused, groups=groups)
        )

    cost(50)
    # Half of the groups on one circle give way at a time: one round more for twice as many.
    assert cost(2000) < 2.3 * cost(1000)


PROGRAM = """
import random, sys
sys.path.insert(0, sys.argv[1])
from fuser_graphs import computing, random_region
from partition_graphs import tied_graph
from lowerdeck.graph_fuser import CycleError, fuse_partitions, legalize_graph, outline
from lowerdeck.graph_fuser import plan_outline, propose_partitions
from lowerdeck.graph_fuser import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

class Support(OperatorSupportBase):
    def is_node_supported(self, submodules, node):
        return node.op == "call_function" and sum(map(ord, node.name)) % 5 > 0

for seed in range(6):
    for kind in range(4):
        rng = random.Random(seed)
        gm = tied_graph(rng, 60)
        nodes = computing(gm)
        calls = [node for node in nodes if node.op == "call_function"]
        if kind == 0:
            proposal = propose_partitions(
                gm,
                lambda node: Support().is_node_supported({}, node),
                groups=[rng.sample(calls, k=2)],
                connected_only=seed % 2 == 0,
            )
            print([(node.name, left.detail) for node, left in proposal.left_out.items()])
            for name, part in fuse_partitions(gm, proposal.named()).items():
                print(name, part.inputs, part.outputs, part.module.graph, part.module.code)
        elif kind == 1:
            halves = ((nodes[:30], "a"), (nodes[30:], "b"))
            regions = [random_region(rng, half, name, 0) for half, name in halves]
            try:
                plan = plan_outline(gm, regions)
                print([plan.steps(region) for region in (None, *plan.regions)])
                done = outline(gm, regions)
                for region, made in done.regions.items():
                    print(region.name, made.inputs, made.outputs, made.module.graph)
            except CycleError as error:
                print(error)
        elif kind == 2:
            for node in rng.sample(calls, k=6):
                rng.choice(calls).append(node)
            legalize_graph(gm)
            try:
                fuse_partitions(gm, {"p": rng.sample(calls, k=8)})
            except CycleError as error:
                print(error)
        else:
            maker = CapabilityBasedPartitioner(gm, Support(), True)
            maker.skip_horizontal_fusion = seed % 2 == 0
            print(maker.propose_partitions())
            maker.partition_and_fuse()
        print(gm.graph)
        print(gm.code)
"""


def test_the_answer_is_the_same_under_every_hash_seed() -> None:
    answers = set()
    for seed in ("0", "1", "77"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, str(Path(__file__).parent)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        answers.add(done.stdout)
    assert len(answers) == 1
    answer = answers.pop()
    assert "fused_0" in answer
    assert "need its own result" in answer


def test_a_legal_graph_costs_legalize_graph_two_calls_a_node() -> None:
    def cost(size: int) -> int:
        gm, _ = long_chain(size)
        return calls(lambda: legalize_graph(gm))

    cost(100)
    assert cost(8000) - cost(4000) <= 2 * 4000


def test_hazards_ask_for_each_operator_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()
    value = graph.placeholder("x")
    targets = torch.ops.aten.sin.default, torch.ops.aten.relu.default
    for number in range(1000):
        value = graph.call_function(targets[number % 2], (value,))
    graph.output(value)
    asked: list[Node] = []
    is_plain = Behaviours.is_plain

    def counted(self: Behaviours, node: Node) -> bool:
        asked.append(node)
        return is_plain(self, node)

    monkeypatch.setattr(Behaviours, "is_plain", counted)
    assert order_hazards(graph, None) == []
    assert [node.target for node in asked] == [*targets]


def test_hazards_ask_again_where_an_argument_may_make_a_plain_callee_write() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    relu = torch.nn.functional.relu
    first = graph.call_function(relu, (x,))
    second = graph.call_function(relu, (x,), {"inplace": True})
    third = graph.call_function(torch.sin, (x,))
    graph.output((first, second, third))
    assert {(first, second), (second, third)} <= {*order_hazards(graph, None)}
