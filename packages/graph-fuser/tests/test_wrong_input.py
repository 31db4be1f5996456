"""Arguments of the wrong kind get an error that says what to give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node, symbolic_trace

from lowerdeck.graph_fuser import RegionError, fuse_partitions, propose_partitions


def traced() -> GraphModule:
    return symbolic_trace(lambda x: (x + 1).relu().sin())


def fuse(partitions: Any, **options: Any) -> None:
    gm = traced()
    before = str(gm.graph)
    try:
        fuse_partitions(gm, partitions, **options)
    finally:
        assert str(gm.graph) == before


def test_partitions_have_names() -> None:
    with pytest.raises(RegionError, match="found a list of partitions; expected a mapping"):
        fuse([["add"]])


def test_partitions_hold_nodes() -> None:
    with pytest.raises(RegionError, match="names 'add', which is a str; expected nodes"):
        fuse({"block": ["add"]})


def test_the_order_of_inputs_is_a_known_one() -> None:
    gm = traced()
    _, add, *_ = gm.graph.nodes
    with pytest.raises(RegionError, match="found input_order='zig'; expected one of 'parent'"):
        fuse_partitions(gm, {"block": [add]}, input_order="zig")  # type: ignore[arg-type]
    assert add in set(gm.graph.nodes)


def test_groups_are_lists_of_nodes() -> None:
    gm = traced()
    _, add, relu, *_ = gm.graph.nodes
    flat: Any = [add, relu]
    with pytest.raises(RegionError, match="groups holds node 'add'; expected lists of nodes"):
        propose_partitions(gm, lambda _: True, groups=flat)
    named: Any = [["add"]]
    with pytest.raises(RegionError, match="found 'add' in groups; expected nodes"):
        propose_partitions(gm, lambda _: True, groups=named)


def test_an_error_of_the_predicate_names_the_node() -> None:
    def supported(node: Node) -> bool:
        return bool(node.meta["val"] is torch.float32)

    with pytest.raises(KeyError) as caught:
        propose_partitions(traced(), supported)
    assert "for node 'add'" in caught.value.__notes__[0]


def test_a_proposal_prints_in_one_line() -> None:
    proposal = propose_partitions(traced(), lambda node: node.target != "sin")
    assert repr(proposal) == "Proposal(2 nodes in 1 partitions, 3 left out)"
