"""The map from debug identifiers to debug handles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from lowerdeck.lowered_module import DelegateMappingBuilder, DelegateMappingError


def nodes_with(*handles: int | None) -> list[Node]:
    graph = Graph()
    nodes = []
    for handle in handles:
        node = graph.call_function(torch.relu)
        if handle is not None:
            node.meta["debug_handle"] = handle
        nodes.append(node)
    return nodes


def test_generated_identifiers_count_from_zero() -> None:
    builder = DelegateMappingBuilder(generated_identifiers=True)
    assert builder.insert_delegate_mapping_entry(handles=5) == 0
    collections: list[Any] = [list, tuple, dict.fromkeys, iter]
    for number, collection in enumerate(collections, 1):
        nodes = collection(nodes_with(9, 2, None))
        assert builder.insert_delegate_mapping_entry(nodes=nodes) == number
    # What is returned is a copy.
    builder.get_delegate_mapping().clear()
    assert builder.get_delegate_mapping() == {0: (5,), **dict.fromkeys(range(1, 5), (2, 9))}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"handles": 1, "identifier": 4}, "generates identifiers"),
        ({}, "both or neither"),
        ({"handles": 1, "nodes": []}, "both or neither"),
        ({"nodes": []}, "expected nodes with debug handles"),
        ({"handles": [None]}, "expected nodes with debug handles"),
        ({"handles": ["a"]}, "expected nodes with debug handles"),
    ],
)
def test_a_refused_entry_burns_no_identifier(arguments: dict[str, Any], message: str) -> None:
    builder = DelegateMappingBuilder(generated_identifiers=True)
    builder.insert_delegate_mapping_entry(handles=7)
    with pytest.raises(DelegateMappingError, match=message):
        builder.insert_delegate_mapping_entry(**arguments)
    assert builder.insert_delegate_mapping_entry(handles=8) == 1
    assert builder.get_delegate_mapping() == {0: (7,), 1: (8,)}


@pytest.mark.parametrize(
    ("identifier", "message"),
    [
        (None, "expected an int or a str"),
        (1.5, "expected an int or a str"),
        ("a", "already"),
        (3, "same type"),
    ],
)
def test_own_identifiers_are_checked(identifier: Any, message: str) -> None:
    builder = DelegateMappingBuilder()
    builder.insert_delegate_mapping_entry(handles=1, identifier="a")
    with pytest.raises(DelegateMappingError, match=message):
        builder.insert_delegate_mapping_entry(handles=2, identifier=identifier)
    assert builder.get_delegate_mapping() == {"a": (1,)}
