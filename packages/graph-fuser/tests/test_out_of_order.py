"""Graphs whose nodes come before what they read, with writes and draws between them.

Such a graph runs in the order that ``legalize_graph`` gives it; whatever is fused must run so too.
"""

from __future__ import annotations

import random

import pytest
import torch
from fuser_graphs import computing, moved, results, tied_graph
from torch.fx import GraphModule

from lowerdeck.graph_fuser import (
    CycleError,
    Region,
    fuse_partitions,
    legalize_graph,
    outline,
    propose_partitions,
    validate_partition,
)
from lowerdeck_zoo.seeds import NIGHTLY, seeds


def disordered(seed: int) -> GraphModule:
    """Return a graph with effects, some of whose nodes were moved."""
    rng = random.Random(seed)
    return moved(tied_graph(rng, 20), rng, 2)


def check(gm: GraphModule, seed: int) -> None:
    """Raise AssertionError unless ``gm``, once in order, computes what it did when it was made."""
    found, expected = (results(legalize_graph(one)) for one in (gm, disordered(seed)))
    gm.graph.lint()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("connected_only", [False, True])
def test_what_is_proposed_is_fused_and_computes_the_same(connected_only: bool) -> None:
    moves = 0
    for seed in seeds(300):
        gm, rng = disordered(seed), random.Random(seed)
        wanted = {node for node in computing(gm) if rng.random() < 0.7}
        legal = [node.name for node in legalize_graph(disordered(seed)).graph.nodes]
        moves += legal != [node.name for node in gm.graph.nodes]
        parts = propose_partitions(gm, wanted.__contains__, connected_only=connected_only).named()
        assert all(validate_partition(part) for part in parts.values())
        fuse_partitions(gm, parts)
        check(gm, seed)
    assert moves


@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_outlined_computes_the_same_or_is_refused(in_place: bool) -> None:
    refused = 0
    for seed in seeds(300):
        gm, rng = disordered(seed), random.Random(seed)
        before = list(gm.graph.nodes)
        try:
            done = outline(gm, [Region("part", rng.sample(computing(gm), 3))], in_place=in_place)
        except CycleError:
            refused += 1
            assert list(gm.graph.nodes) == before
            continue
        assert isinstance(done.module, GraphModule)
        check(done.module, seed)
        assert in_place or list(gm.graph.nodes) == before
    assert not NIGHTLY or 30 < refused < 270
