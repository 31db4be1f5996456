"""What is proposed can be fused, on graphs straight from torch.export: nothing functional."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from raw_models import raw_graph, run_raw
from torch.fx import GraphModule, Node, symbolic_trace

from lowerdeck.graph_fuser import fuse_partitions, propose_partitions, validate_partition
from lowerdeck.torch_base import is_getitem
from lowerdeck_zoo.seeds import seeds


def check(gm: GraphModule, supported: set[str], rng: random.Random) -> int:
    """Fuse what is proposed, compare all numbers, and return how many partitions there were."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    groups = [rng.sample(nodes, k=2)] if len(nodes) > 3 and rng.random() < 0.3 else []
    expected = run_raw(gm)
    proposal = propose_partitions(
        gm,
        lambda node: node.name in supported,
        groups=groups,
        connected_only=rng.random() < 0.5,
        min_nodes=rng.randrange(3),
    )
    fuse_partitions(gm, proposal.named())
    gm.graph.lint()
    torch.testing.assert_close(run_raw(gm), expected, rtol=0, atol=0)
    return len(proposal)


@pytest.mark.filterwarnings("ignore")
def test_raw_graphs_with_views_and_writes_fuse_as_proposed() -> None:
    graphs = partitions = 0
    for seed in seeds(120):
        gm = raw_graph(seed)
        if gm is None:
            continue
        rng = random.Random(seed)
        graphs += 1
        # What writes is often what a backend refuses; sometimes anything is.
        share = rng.choice([0.0, 0.2])
        supported = {
            node.name
            for node in gm.graph.nodes
            if node.op == "call_function"
            and not (share == 0.0 and writes(node))
            and rng.random() >= share
        }
        partitions += check(gm, supported, rng)
    assert partitions > graphs > 0


def writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def test_an_element_taken_after_a_write_stays_with_its_tuple() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            p = (x + 1).split(2)
            p[0].add_(1)
            return p[1] * 2

    for gm in (
        symbolic_trace(Model()),
        torch.export.export(Model(), (torch.ones(4),)).graph_module,
    ):
        proposal = propose_partitions(gm, lambda node: "add_" not in str(node.target))
        partition_of = {node: number for number, part in enumerate(proposal) for node in part}
        elements = [node for node in gm.graph.nodes if is_getitem(node)]
        assert {partition_of[node] for node in elements} == {partition_of[elements[0].args[0]]}
        fuse_partitions(gm, proposal.named())
        made = gm(torch.arange(4.0))
        made = made[0] if isinstance(made, tuple) else made
        torch.testing.assert_close(made, torch.tensor([6.0, 8.0]))


def test_a_part_of_a_tensor_read_after_a_write_leaves_its_producer() -> None:
    def model(x: Any) -> Any:
        y = x + 1
        first = y[0]
        first.add_(1)
        return y[torch.tensor([0, 1])]

    gm = symbolic_trace(model)
    proposal = propose_partitions(gm, lambda node: node.target != "add_")
    fuse_partitions(gm, proposal.named())
    torch.testing.assert_close(gm(torch.zeros(3)), torch.tensor([2.0, 1.0]))


def test_elements_taken_under_another_mode_stay_with_their_tuple() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            first, second = (x + 1).split(2)
            with torch.autocast("cpu"):
                third = first.sin()
            return third + second

    program = torch.export.export(Model(), (torch.ones(4),))
    check(program.graph_module, {n.name for n in program.graph.nodes}, random.Random(0))


def test_readers_that_export_forgot_are_known() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            first, second = (x + 1).chunk(2, 1)
            with torch.no_grad():
                third = first * 2
            rows = torch.cat([third, second], 1)
            rows[1:3] = x[0]
            return rows

    x = torch.arange(16.0).view(4, 4)
    gm = torch.export.export(Model(), (x,)).graph_module
    n = {node.name: node for node in gm.graph.nodes}
    assert not validate_partition([n["cat"], n["copy_"]])
    gm = torch.export.export(Model(), (x,)).graph_module
    n = {node.name: node for node in gm.graph.nodes}
    fuse_partitions(gm, {"p": [n["cat"]]})
    torch.testing.assert_close(gm(x)[0], Model()(x))
