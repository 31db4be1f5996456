"""Graphs whose nodes come before what they read, with writes and draws between them.

Such a graph runs in the order that ``legalize_graph`` gives it; whatever is fused must run so too.
"""

from __future__ import annotations

import random

import pytest
import torch
from fuser_graphs import computing, moved, results, tied_graph
from torch.fx import GraphModule, symbolic_trace

from lowerdeck.graph_fuser import (
    CycleError,
    Region,
    RegionError,
    fuse_as_graphmodule,
    legalize_graph,
    outline,
    plan_outline,
    propose_partitions,
    validate_partition,
)
from lowerdeck_zoo.seeds import NIGHTLY, seeds


def disordered(seed: int) -> GraphModule:
    """Return a graph with effects, some of whose nodes were moved."""
    rng = random.Random(seed)
    gm = moved(tied_graph(rng, 20), rng, 2)
    gm.recompile()  # Inputs may have been moved.
    return gm


def check(gm: GraphModule, seed: int) -> None:
    """Raise AssertionError unless ``gm``, once in order, computes what it did when it was made."""
    found, expected = (results(legalize_graph(one)) for one in (gm, disordered(seed)))
    gm.graph.lint()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_what_is_outlined_computes_the_same_or_is_refused() -> None:
    refused = 0
    for seed in seeds(300):
        gm, rng = disordered(seed), random.Random(seed)
        try:
            outline(gm, [Region("part", rng.sample(computing(gm), 3))])
        except CycleError:
            refused += 1
        check(gm, seed)
    assert not NIGHTLY or 30 < refused < 270


def test_what_only_looks_asks_for_an_order() -> None:
    gm = symbolic_trace(lambda x: (x + 1).relu())
    _, add, relu, _ = gm.graph.nodes
    relu.append(add)
    for look in (
        lambda: propose_partitions(gm, lambda _: True),
        lambda: plan_outline(gm, [Region("part", [relu])]),
        lambda: validate_partition([relu]),
        lambda: fuse_as_graphmodule(gm, [relu], "Part"),
    ):
        with pytest.raises(RegionError, match=r"'relu' comes before 'add'.*Call legalize_graph"):
            look()
