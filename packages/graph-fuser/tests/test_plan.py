"""Plans tell what outlining makes, and build it region by region, now or later."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from fuser_graphs import computing, random_graph, random_region
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from lowerdeck.graph_fuser import (
    CycleError,
    NameInUseError,
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
    graphs: dict[Region | None, Graph] = {}

    def make_module(region: Region | None, graph: Graph) -> torch.nn.Module:
        graphs[region] = graph
        return torch.nn.Module()

    done = outline(gm, regions, in_place=False, make_module=make_module, input_order="first_use")
    assert plan.regions == tuple(done.regions)
    for region, outlined in done.regions.items():
        assert plan.inputs(region) == outlined.inputs
        assert plan.outputs(region) == outlined.outputs
        assert plan.returns_bare(region) == (outlined.results == (outlined.call_node,))
    for owner, graph in graphs.items():
        built = plan.graph(owner)
        assert described(built.graph) == described(graph)
        called = [step for step in plan.steps(owner) if isinstance(step, Region)]
        assert set(called) == set(built.calls) == set(built.results)
        calls = [node for node in built.graph.nodes if node in set(built.calls.values())]
        assert calls == [built.calls[step] for step in called]
        if owner is not None:
            assert described(plan.defer(owner, graph).build()) == described(graph)
    assert described(gm.graph) == before


def equal_regions() -> tuple[GraphModule, OutlinePlan, Region, Region]:
    gm = symbolic_trace(lambda x: ((x + 1).relu() + 1).relu())
    nodes = computing(gm)
    for node in gm.graph.nodes:
        node.meta["val"] = node.name
    one, two = Region("one", nodes[:2]), Region("two", nodes[2:])
    return gm, plan_outline(gm, [one, two]), one, two


def test_a_deferred_graph_needs_neither_program_nor_plan() -> None:
    gm, plan, one, two = equal_regions()
    wanted = described(plan.graph(two).graph)
    later = plan.defer(two, plan.graph(one).graph)
    for node in gm.graph.nodes:
        node.meta["val"] = "changed"
    gone = weakref.ref(gm.graph)
    del gm, plan, node, one, two
    gc.collect()
    assert gone() is None
    first, second = later.build(), later.build()
    assert described(first) == described(second) == wanted
    assert first is not second
    next(iter(first.nodes)).meta["val"] = "changed"
    assert described(later.build()) == wanted


def test_a_graph_of_another_length_and_equal_names_are_refused() -> None:
    gm, plan, one, _ = equal_regions()
    with pytest.raises(RegionError, match="has 4 nodes with its inputs and output; found 6"):
        plan.defer(one, gm.graph)

    two = Region("one", computing(gm)[2:])
    with pytest.raises(NameInUseError, match="Two sibling regions"):
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
    assert described(plan.defer(one, built).build()) == described(built)


def test_a_plan_brings_nodes_in_order_where_nothing_else_does() -> None:
    # Without effects nodes may stay where they are, but not in a graph that is built anew.
    gm = symbolic_trace(lambda x: (x.relu() + 1).neg())
    _, relu, _, neg, _ = gm.graph.nodes
    neg.append(relu)
    plan = plan_outline(gm, [Region("part", [neg])])
    wanted = ["x", "relu", "add", "part", "output"]
    assert [step.name for step in plan.steps(None)] == wanted
    assert [node.name for node in plan.graph(None).graph.nodes] == wanted
