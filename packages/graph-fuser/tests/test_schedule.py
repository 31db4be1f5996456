"""Every list of nodes that can be fused is, and no other, in whatever order they are."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch
from fuser_graphs import node_lists, results, tied_graph
from fuser_oracle import contracted, is_acyclic, is_true_cycle
from torch.fx import Graph, GraphModule, symbolic_trace

from lowerdeck.graph_fuser import CycleError, fuse_partitions
from lowerdeck.graph_fuser.order.hazards import order_hazards
from lowerdeck.graph_fuser.outliner.anchors import anchored, stride
from lowerdeck.graph_fuser.outliner.boundary import find_boundary
from lowerdeck.graph_fuser.regions import ROOT, Region, RegionTree, region_tree
from lowerdeck_zoo.seeds import seeds


@pytest.mark.parametrize(("count", "smallest", "largest"), [(600, 3, 30), (60, 60, 160)])
def test_lists_of_nodes_fuse_if_and_only_if_no_path_leaves_and_comes_back(
    count: int, smallest: int, largest: int
) -> None:
    fused = refused = 0
    for seed in seeds(count):
        rng = random.Random(seed)
        gm = tied_graph(rng, rng.randint(smallest, largest))
        lists = node_lists(rng, gm)
        hazards = order_hazards(gm.graph, gm)
        region_of = {node: name for name, nodes in lists.items() for node in nodes}
        if not is_acyclic(contracted(gm.graph, list(lists.values()), hazards)):
            with pytest.raises(CycleError) as caught:
                fuse_partitions(gm, lists)
            assert is_true_cycle(caught.value.path, caught.value.regions, region_of, hazards), seed
            refused += 1
            continue
        expected = results(gm)
        fuse_partitions(gm, lists)
        gm.graph.lint()
        torch.testing.assert_close(results(gm), expected, rtol=0, atol=0, msg=f"seed {seed}")
        fused += 1
    assert fused + refused < 20 or min(fused, refused) > (fused + refused) // 20


def test_no_two_calls_have_one_key() -> None:
    for seed in seeds(200):
        rng = random.Random(seed)
        gm = tied_graph(rng, rng.randint(3, 60))
        lists = node_lists(rng, gm)
        tree = region_tree(gm.graph, [Region(name, nodes) for name, nodes in lists.items()])
        boundary = find_boundary(tree, order=order_hazards(gm.graph, gm))
        keys = anchored(tree, tree.children[ROOT], boundary.edges[ROOT])
        taken = [*keys.values()]
        taken += [
            position * stride(tree)
            for node, position in tree.position.items()
            if node not in tree.region_of
        ]
        assert len(set(taken)) == len(taken), seed
        assert all(key >= 0 for key in taken)


def test_a_call_is_hoisted_past_the_first_node_of_a_graph_without_inputs() -> None:
    root = torch.nn.Module()
    root.register_buffer("state", torch.ones(2))
    graph = Graph()
    first = graph.get_attr("state")
    other = graph.get_attr("state")
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (other, 2))
    total = graph.call_function(torch.ops.aten.add.Tensor, (first, doubled))
    last = graph.call_function(torch.ops.aten.neg.default, (first,))
    graph.output((total, last))
    gm = GraphModule(root, graph)
    fuse_partitions(gm, {"reads": [first, total], "makes": [other, doubled]})
    gm.graph.lint()
    torch.testing.assert_close(gm(), (torch.full((2,), 3.0), -torch.ones(2)))


def test_suppliers_that_are_hoisted_come_in_the_order_in_which_they_are_needed() -> None:
    gm = symbolic_trace(lambda x: (x.neg().relu(), x.sin().cos().exp()))
    _, early, outside, first, second, late, _ = gm.graph.nodes
    graph, expected = gm.graph, gm(torch.ones(2))
    lists = {"reader": [early, late], "middle": [second], "source": [first]}
    tree = region_tree(graph, [Region(name, nodes) for name, nodes in lists.items()])
    keys = anchored(tree, tree.children[ROOT], find_boundary(tree).edges[ROOT])
    assert sorted(lists, key=lambda name: _key(tree, keys, name)) == ["source", "middle", "reader"]
    assert max(keys.values()) < tree.position[outside] * stride(tree)
    fuse_partitions(gm, lists)
    torch.testing.assert_close(gm(torch.ones(2)), expected)


def _key(tree: RegionTree, keys: Mapping[int, int], name: str) -> int:
    return next(key for child, key in keys.items() if tree.name(child) == name)


def test_a_region_that_begins_a_graph_out_of_order_is_sorted() -> None:
    root = torch.nn.Module()
    root.register_buffer("state", torch.ones(2))
    graph = Graph()
    state = graph.get_attr("state")
    negated = graph.call_function(torch.ops.aten.neg.default, (state,))
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (negated, 2))
    graph.output(doubled)
    state.prepend(negated)
    gm = GraphModule(root, graph)
    fuse_partitions(gm, {"fused": [negated, state]})
    gm.graph.lint()
    torch.testing.assert_close(gm(), torch.full((2,), -2.0))
