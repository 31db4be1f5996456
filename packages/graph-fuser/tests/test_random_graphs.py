"""Random graphs and random node lists: right numbers, or the true cycle."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from fuser_graphs import (
    SETTINGS,
    computing,
    example_inputs,
    random_graph,
    random_region,
    random_writing_graph,
)
from fuser_oracle import contracted, is_acyclic, is_true_cycle
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import GraphModule, Node

from lowerdeck.graph_fuser import (
    CycleError,
    create_submodule_from_nodes,
    fuse_partitions,
    inline_submodule,
    outline,
    propose_partitions,
    validate_partition,
)
from lowerdeck.graph_fuser.order.hazards import order_hazards

seeds = st.integers(0, 10**9)


def random_partitions(rng: random.Random, nodes: list[Node]) -> dict[str, list[Node]]:
    """Return up to four partitions, from scattered to contiguous, each in shuffled order."""
    count = rng.randint(1, 4)
    style = rng.randrange(3)
    found: dict[str, list[Node]] = {f"p{number}": [] for number in range(count)}
    for index, node in enumerate(nodes):
        own = index * count // len(nodes)
        if style == 0 and rng.random() < 0.4:
            found[f"p{rng.randrange(count)}"].append(node)
        elif style == 1:
            found[f"p{own}"].append(node)
        elif style == 2 and rng.random() < 0.9:
            found[f"p{min(count - 1, own + (rng.random() < 0.1))}"].append(node)
    for members in found.values():
        rng.shuffle(members)
    return {name: members for name, members in found.items() if members}


def run(gm: GraphModule) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    result: tuple[torch.Tensor, ...] = gm(*(value.clone() for value in example_inputs(gm)))
    return result


def assert_same(gm: GraphModule, expected: tuple[torch.Tensor, ...]) -> None:
    for value, other in zip(run(gm), expected, strict=True):
        torch.testing.assert_close(value, other)


def check_fusing(gm: GraphModule, rng: random.Random) -> None:
    partitions = random_partitions(rng, computing(gm))
    if not partitions:
        return
    expected = run(gm)
    hazards = order_hazards(gm.graph, gm)
    possible = is_acyclic(contracted(gm.graph, list(partitions.values()), hazards))
    partition_of = {node: name for name, members in partitions.items() for node in members}
    before = [(node, node.args, node.kwargs) for node in gm.graph.nodes]
    outside = [node for node in gm.graph.nodes if node not in partition_of]
    if not possible:
        with pytest.raises(CycleError) as caught:
            fuse_partitions(gm, partitions)
        assert is_true_cycle(caught.value.path, caught.value.regions, partition_of, hazards)
        assert [(node, node.args, node.kwargs) for node in gm.graph.nodes] == before
        return
    fused = fuse_partitions(gm, partitions)
    gm.graph.lint()
    for part in fused.values():
        part.module.graph.lint()
    assert_same(gm, expected)
    kept = [node for node in gm.graph.nodes if node in set(outside)]
    assert set(kept) == set(outside)
    check_moves(gm, outside, kept)


def check_moves(gm: GraphModule, before: list[Node], after: list[Node]) -> None:
    """Two nodes may change positions only if the one that went back now needs some later node."""
    index_of = {node: number for number, node in enumerate(before)}
    needs: dict[Node, int] = {}
    for node in gm.graph.nodes:
        own = index_of.get(node, -1)
        needs[node] = max([own, *(needs[source] for source in node.all_input_nodes)])
    latest = -1
    for node in after:
        if index_of[node] < latest and not order_hazards(gm.graph, gm):
            assert needs[node] > index_of[node]
        latest = max(latest, index_of[node])


@SETTINGS
@given(seeds)
def test_random_lists_fuse_right_or_are_refused_with_the_true_cycle(seed: int) -> None:
    rng = random.Random(seed)
    check_fusing(random_graph(seed, rng.randint(3, 40)), rng)


@SETTINGS
@given(seeds)
def test_writes_draws_and_views_keep_their_numbers(seed: int) -> None:
    rng = random.Random(seed)
    check_fusing(random_writing_graph(seed, rng.randint(3, 25)), rng)


@SETTINGS
@given(seeds)
def test_validate_partition_agrees_with_fusing(seed: int) -> None:
    rng = random.Random(seed)
    gm = random_graph(seed, 15)
    nodes = rng.sample(computing(gm), k=rng.randint(1, 6))
    assert validate_partition(nodes) == is_acyclic(contracted(gm.graph, [nodes]))


@SETTINGS
@given(seeds)
def test_one_submodule_at_a_time_is_right_too(seed: int) -> None:
    rng = random.Random(seed)
    gm = random_graph(seed, 20)
    expected = run(gm)
    for tag in range(3):
        nodes = [node for node in computing(gm) if node.op == "call_function"]
        start = rng.randrange(len(nodes))
        try:
            module, call = create_submodule_from_nodes(gm, nodes[start : start + 5], str(tag))
        except CycleError:
            continue
        gm.graph.lint()
        module.graph.lint()
        assert call.target == f"fused_{tag}"
        assert isinstance(module.graph.output_node().args[0], list)
    assert_same(gm, expected)


@SETTINGS
@given(seeds)
def test_random_hierarchies_compute_the_same_in_place_and_beside(seed: int) -> None:
    rng = random.Random(seed)
    gm = random_writing_graph(seed, 30) if rng.random() < 0.4 else random_graph(seed, 40)
    expected = run(gm)
    nodes = computing(gm)
    half = rng.randrange(1, len(nodes))
    regions = [random_region(rng, nodes[:half], "a", 0), random_region(rng, nodes[half:], "b", 0)]
    before = [(node, node.args) for node in gm.graph.nodes]
    try:
        beside = outline(gm, regions, in_place=False)
    except CycleError:
        assert [(node, node.args) for node in gm.graph.nodes] == before
        return
    assert [(node, node.args) for node in gm.graph.nodes] == before
    assert isinstance(beside.module, GraphModule)
    beside.module.graph.lint()
    assert_same(beside.module, expected)
    done = outline(gm, regions, input_order="first_use")
    gm.graph.lint()
    assert len(gm.graph.nodes) == len(beside.module.graph.nodes)
    assert_same(gm, expected)
    assert_same(copy.deepcopy(gm), expected)
    assert set(done.regions) == set(beside.regions)


@SETTINGS
@given(seeds)
def test_fusing_then_inlining_gives_the_same_graph(seed: int) -> None:
    rng = random.Random(seed)
    gm = random_graph(seed, 25)
    expected = run(gm)
    before = canonical(gm)
    order = [node.target for node in gm.graph.nodes]
    nodes = computing(gm)
    start = rng.randrange(len(nodes))
    block = nodes[start : start + rng.randint(1, 10)]
    fused = fuse_partitions(gm, {"p": block})["p"]
    copies = inline_submodule(gm, fused.call_node)
    gm.graph.lint()
    assert canonical(gm) == before
    assert [node.target for node in gm.graph.nodes] == order
    assert [node.meta for node in copies.values()] == [node.meta for node in block]
    assert "p" not in gm._modules
    assert_same(gm, expected)


def canonical(gm: GraphModule) -> list[object]:
    """Return the graph with every node called by its index."""
    index_of = {node: number for number, node in enumerate(gm.graph.nodes)}
    return [
        (
            node.op,
            str(node.target),
            str(torch.fx.node.map_arg(node.args, lambda n: f"#{index_of[n]}")),
            str(torch.fx.node.map_arg(node.kwargs, lambda n: f"#{index_of[n]}")),
        )
        for node in gm.graph.nodes
    ]


@SETTINGS
@given(seeds)
def test_every_proposal_can_be_fused_and_computes_the_same(seed: int) -> None:
    rng = random.Random(seed)
    gm = random_writing_graph(seed, 25) if rng.random() < 0.5 else random_graph(seed, 30)
    expected = run(gm)
    out = {node for node in gm.graph.nodes if rng.random() < 0.3}
    nodes = computing(gm)
    groups = [rng.sample(nodes, k=2)] if len(nodes) > 3 and rng.random() < 0.5 else []
    proposal = propose_partitions(
        gm,
        lambda node: node not in out,
        groups=groups,
        connected_only=rng.random() < 0.5,
        min_nodes=rng.randint(0, 3),
    )
    inside = [node for part in proposal for node in part]
    assert len(set(inside)) == len(inside)
    assert set(inside).isdisjoint(proposal.left_out)
    assert set(inside) | set(proposal.left_out) == set(gm.graph.nodes)
    for group in groups:
        found = {number for number, part in enumerate(proposal) for node in group if node in part}
        left = [node for node in group if node in proposal.left_out]
        assert len(found) <= 1
        assert len(left) in {0, len(group)}
    fuse_partitions(gm, proposal.named())
    assert_same(gm, expected)
