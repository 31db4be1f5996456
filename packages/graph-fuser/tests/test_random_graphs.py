"""Random graphs, regions and proposals: right numbers, and nothing changed by an error."""

from __future__ import annotations

import copy
import random

from fuser_graphs import computing, random_graph, random_region, results, same_results, tied_graph
from torch.fx import GraphModule

from lowerdeck.graph_fuser import (
    CycleError,
    Region,
    create_submodule_from_nodes,
    fuse_partitions,
    outline,
    plan_outline,
    propose_partitions,
)
from lowerdeck_zoo.seeds import seeds


def any_graph(rng: random.Random, size: int) -> GraphModule:
    """Return a graph that also writes, reads through views and draws, or a pure one."""
    return tied_graph(rng, size) if rng.random() < 0.5 else random_graph(rng.randrange(9999), size)


def test_one_submodule_at_a_time() -> None:
    for seed in seeds(250):
        gm = random_graph(seed, 20)
        rng, expected = random.Random(seed), results(gm)
        for tag in range(3):
            nodes = [node for node in computing(gm) if node.op == "call_function"]
            start = rng.randrange(len(nodes))
            try:
                module, call = create_submodule_from_nodes(gm, nodes[start : start + 5], str(tag))
            except CycleError:
                continue
            module.graph.lint()
            assert call.target == f"fused_{tag}"
            assert isinstance(module.graph.output_node().args[0], list)
        same_results(gm, expected)


def test_hierarchies_compute_the_same() -> None:
    count = 0
    for seed in seeds(250):
        rng = random.Random(seed)
        gm = any_graph(rng, 35)
        expected, nodes = results(gm), computing(gm)
        half = rng.randrange(1, len(nodes))
        parts = {"a": nodes[:half], "b": nodes[half:]}
        regions = [random_region(rng, part, name, 0) for name, part in parts.items()]
        before = [(node, node.args) for node in gm.graph.nodes]
        try:
            plan = plan_outline(gm, regions)
        except CycleError:
            assert [(node, node.args) for node in gm.graph.nodes] == before
            continue
        count += 1
        assert [(node, node.args) for node in gm.graph.nodes] == before
        steps = [step.name for step in plan.steps(None) if isinstance(step, Region)]
        outlined = outline(gm, regions, input_order="first_use")
        calls = gm.graph.find_nodes(op="call_module")
        assert [node.target for node in calls if node.target in parts] == steps
        same_results(copy.deepcopy(gm), expected)
        assert tuple(outlined) == plan.regions
    assert count


def test_every_proposal_can_be_fused_and_computes_the_same() -> None:
    for seed in seeds(250):
        rng = random.Random(seed)
        gm = any_graph(rng, 30)
        expected, nodes = results(gm), computing(gm)
        out = {node for node in gm.graph.nodes if rng.random() < 0.3}
        groups = [rng.sample(nodes, k=2)] if len(nodes) > 3 and rng.random() < 0.5 else []
        proposal = propose_partitions(
            gm,
            lambda node, out=out: node not in out,  # type: ignore[misc]
            groups=groups,
            min_nodes=rng.randint(0, 3),
        )
        inside = [node for part in proposal for node in part]
        assert len(set(inside)) == len(inside)
        assert set(inside).isdisjoint(proposal.left_out)
        assert all(node.name in left.detail for node, left in proposal.left_out.items())
        assert set(inside) | set(proposal.left_out) == set(gm.graph.nodes)
        for group in groups:
            parts = {number for number, part in enumerate(proposal) if {*part} & {*group}}
            assert len(parts) <= 1
            assert len([node for node in group if node in proposal.left_out]) in {0, len(group)}
        fuse_partitions(gm, proposal.named())
        same_results(gm, expected)
