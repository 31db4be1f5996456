"""Plans return what outlining makes."""

from __future__ import annotations

import random

import pytest
from fuser_graphs import computing, random_graph, random_region
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from lowerdeck.graph_fuser import (
    CycleError,
    OutlinePlan,
    Region,
    RegionError,
    outline,
    plan_outline,
)
from lowerdeck_zoo.seeds import seeds


def described(graph: Graph) -> list[object]:
    """Return all that two graphs must have in common to be taken for one another."""
    return [
        (
            node.op,
            node.name,
            str(node.target),
            str(node.args),
            str(node.kwargs),
            described_meta(node),
        )
        for node in graph.nodes
    ]


def described_meta(node: Node) -> list[tuple[str, object]]:
    # By identity: values are tensors, or tuples of tensors.
    return [
        (key, tuple(map(id, value)) if isinstance(value, tuple) else id(value))
        for key, value in node.meta.items()
    ]


def random_plan(seed: int) -> tuple[GraphModule, list[Region]]:
    rng = random.Random(seed)
    gm = random_graph(seed, 40)
    for node in gm.graph.nodes:
        node.meta["stack_trace"] = f"line of {node.name}"
        node.meta["tag"] = node.name
    nodes = computing(gm)
    half = rng.randrange(1, len(nodes))
    inside = [node for node in nodes[half:] if rng.random() < 0.9] or nodes[half:]
    return gm, [random_region(rng, nodes[:half], "a", 0), random_region(rng, inside, "b", 0)]


def test_a_plan_returns_what_outline_makes() -> None:
    for seed in seeds(200):
        check_plan(seed)


def check_plan(seed: int) -> None:
    gm, regions = random_plan(seed)
    before = described(gm.graph)
    try:
        plan = plan_outline(gm, regions, input_order="first_use")
    except CycleError:
        with pytest.raises(CycleError):
            outline(gm, regions, input_order="first_use")
        return
    assert described(gm.graph) == before
    steps = {owner: plan.steps(owner) for owner in (None, *plan.regions)}
    outlined = outline(gm, regions, input_order="first_use")
    assert plan.regions == tuple(outlined)
    calls: dict[Node, Region] = {one.call_node: region for region, one in outlined.items()}
    unpacked = {node for one in outlined.values() for node in one.results} - calls.keys()

    def body(graph: Graph) -> list[str]:
        return [calls.get(node, node).name for node in graph.nodes if node not in unpacked]

    assert body(gm.graph) == [step.name for step in steps[None]]
    for region, one in outlined.items():
        assert plan.inputs(region) == one.inputs
        assert plan.outputs(region) == one.outputs
        assert plan.returns_bare(region) == (one.results == (one.call_node,))
        inputs = len(one.inputs)
        assert body(one.module.graph)[inputs:-1] == [step.name for step in steps[region]]


def equal_regions() -> tuple[GraphModule, OutlinePlan, Region, Region]:
    gm = symbolic_trace(lambda x: ((x + 1).relu() + 1).relu())
    nodes = computing(gm)
    for node in gm.graph.nodes:
        node.meta["val"] = node.name
    one, two = Region("one", nodes[:2]), Region("two", nodes[2:])
    return gm, plan_outline(gm, [one, two]), one, two


def test_equal_names_are_refused() -> None:
    gm, _, one, _ = equal_regions()
    two = Region("one", computing(gm)[2:])
    with pytest.raises(RegionError, match="Two sibling regions"):
        plan_outline(gm, [one, two])
