"""Plans tell what outlining makes, and build it region by region, now or later."""

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


def test_a_plan_tells_and_builds_what_outline_makes() -> None:
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
    graphs = {owner: plan.graph(owner) for owner in (None, *plan.regions)}
    assert described(gm.graph) == before
    for owner, built in graphs.items():
        called = [step for step in plan.steps(owner) if isinstance(step, Region)]
        assert set(called) == set(built.calls) == set(built.results)
        calls = [node for node in built.graph.nodes if node in set(built.calls.values())]
        assert calls == [built.calls[step] for step in called]
    outlined = outline(gm, regions, input_order="first_use")
    assert plan.regions == tuple(outlined)
    for region, one in outlined.items():
        assert plan.inputs(region) == one.inputs
        assert plan.outputs(region) == one.outputs
        assert plan.returns_bare(region) == (one.results == (one.call_node,))
        assert described(one.module.graph) == described(graphs[region].graph)


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


def test_attributes_replace_inputs() -> None:
    gm, _, one, two = equal_regions()
    placeholder = next(iter(gm.graph.nodes))

    def attribute_name(region: Region | None, node: Node) -> str | None:
        return "a.weight" if region is one and node is placeholder else None

    plan = plan_outline(gm, [one, two], attribute_name=attribute_name)
    assert dict(plan.attributes(one)) == {placeholder: "a.weight"}
    assert plan.inputs(one) == ()
    built = plan.graph(one).graph
    assert next(node.name for node in built.nodes) == "a_weight"
