"""Graphs whose nodes come before what they read, with writes and draws between them.

Such a graph runs in the order that ``legalize_graph`` gives it; whatever is fused must run so too.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from lowerdeck.graph_fuser import (
    CycleError,
    Region,
    fuse_partitions,
    legalize_graph,
    outline,
    propose_partitions,
    validate_partition,
)
from lowerdeck.graph_fuser._torch_private import lazy_graph_module
from lowerdeck_zoo.seeds import NIGHTLY, seeds

aten = torch.ops.aten
X = torch.linspace(0.1, 0.6, 4)


def disordered(seed: int, size: int = 14) -> tuple[GraphModule, list[Node]]:
    """Return a graph with effects, some of whose nodes were moved, and its computing nodes."""
    rng, graph = random.Random(seed), Graph()
    x = graph.placeholder("x")
    made = [graph.call_function(aten.clone.default, (x,))]
    # Near ones, so that work grows with the size alone.
    for _ in range(size):
        kind, near = rng.random(), made[-8:]
        if kind < 0.25:
            made.append(
                graph.call_function(aten.add_.Tensor, (rng.choice(near), rng.choice(near)))
            )
        elif kind < 0.35:
            made.append(graph.call_function(aten.view.default, (rng.choice(near), [4])))
        elif kind < 0.4:
            made.append(graph.call_function(aten.rand_like.default, (rng.choice(near),)))
        else:
            made.append(
                graph.call_function(aten.mul.Tensor, (rng.choice(near), rng.choice([x, *near])))
            )
    graph.output(tuple(made[-3:]))
    for _ in range(max(2, size // 20)):
        index = rng.randrange(len(made))
        one, other = made[index], rng.choice(made[max(0, index - 8) : index + 8])
        if one is not other:
            rng.choice([one.append, one.prepend])(other)
    return lazy_graph_module("Disordered", graph), made


def result(gm: GraphModule) -> list[torch.Tensor]:
    """Return what ``gm`` computes once its nodes are in order."""
    legalize_graph(gm)
    gm.graph.lint()
    gm.recompile()
    torch.manual_seed(0)
    return [value.clone() for value in gm(X.clone())]


@pytest.mark.parametrize("connected_only", [False, True])
def test_what_is_proposed_is_fused_and_computes_the_same(connected_only: bool) -> None:
    moved = 0
    for seed in seeds(300):
        gm, nodes = disordered(seed)
        rng = random.Random(seed)
        wanted = {node for node in nodes if rng.random() < 0.7}
        legal = [node.name for node in legalize_graph(disordered(seed)[0]).graph.nodes]
        moved += legal != [node.name for node in gm.graph.nodes]
        parts = propose_partitions(gm, wanted.__contains__, connected_only=connected_only).named()
        assert all(validate_partition(part) for part in parts.values())
        fuse_partitions(gm, parts)
        torch.testing.assert_close(result(gm), result(disordered(seed)[0]), equal_nan=True)
    assert moved


@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_outlined_computes_the_same_or_is_refused(in_place: bool) -> None:
    refused = 0
    for seed in seeds(300):
        gm, nodes = disordered(seed)
        rng = random.Random(seed)
        before = list(gm.graph.nodes)
        try:
            done = outline(gm, [Region("part", rng.sample(nodes, 3))], in_place=in_place)
        except CycleError:
            refused += 1
            assert list(gm.graph.nodes) == before
            continue
        made = done.module
        assert isinstance(made, GraphModule)
        torch.testing.assert_close(result(made), result(disordered(seed)[0]), equal_nan=True)
        if not in_place:
            assert list(gm.graph.nodes) == before
    assert not NIGHTLY or 30 < refused < 270


def _calls(action: Callable[[], object]) -> int:
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


@pytest.mark.parametrize("connected_only", [False, True])
def test_twice_the_graph_costs_twice_the_steps(connected_only: bool) -> None:
    def cost(size: int) -> int:
        found = 0
        for seed in seeds(4):
            gm, nodes = disordered(seed, size)
            wanted = {node for index, node in enumerate(nodes) if index % 7}
            parts = propose_partitions(gm, wanted.__contains__, connected_only=connected_only)
            found += _calls(
                lambda gm=gm, wanted=wanted: propose_partitions(  # type: ignore[misc]
                    gm, wanted.__contains__, connected_only=connected_only
                )
            )
            found += _calls(lambda gm=gm, parts=parts: fuse_partitions(gm, parts.named()))  # type: ignore[misc]
        return found

    cost(100)
    costs = [cost(size) for size in (500, 1000, 2000)]
    assert all(more < 2.5 * less for less, more in pairwise(costs)), costs
