"""Every list of nodes that can be fused is, and no other, in whatever order they are."""

from __future__ import annotations

import random

import pytest
import torch
from fuser_graphs import node_lists, results, tied_graph
from fuser_oracle import contracted, is_acyclic, is_true_cycle
from torch.fx import Graph, GraphModule

from lowerdeck.graph_fuser import CycleError, fuse_partitions
from lowerdeck.graph_fuser.order.hazards import order_hazards
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


def test_a_call_that_begins_a_graph_without_inputs() -> None:
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
