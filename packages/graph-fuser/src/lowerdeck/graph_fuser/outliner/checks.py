"""Validation of names and attributes before any mutation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.fx import GraphModule, Node

from lowerdeck.graph_fuser.errors import RegionError
from lowerdeck.graph_fuser.regions import ROOT, RegionTree
from lowerdeck.torch_base import attribute_of


def check_names(tree: RegionTree, gm: GraphModule | None = None) -> None:
    """Raise unless sibling names are unique and the outermost names are unused in ``gm``."""
    for children in tree.children:
        names: set[str] = set()
        for child in children:
            name = tree.name(child) or ""
            if "" in name.split("."):
                raise RegionError(
                    f"Region name {name!r} is not an attribute path; expected one or more "
                    "non-empty parts joined by dots."
                )
            if name in names:
                raise RegionError(
                    f"Two sibling regions are named {name!r}; give each its own name."
                )
            names.add(name)
    if gm is not None:
        check_free(gm, [tree.name(child) or "" for child in tree.children[ROOT]])


def check_free(gm: GraphModule, names: Sequence[str]) -> None:
    """Raise ``RegionError`` unless submodules may be installed under ``names``."""
    used: set[str] | None = None
    for name in names:
        holder, _, last = name.rpartition(".")
        _check_holder(gm, holder)
        attribute = attribute_of(gm, name)
        if attribute is None:
            continue
        if not isinstance(attribute, torch.nn.Module):
            raise RegionError(
                f"The module already has an attribute {last!r} that is not a submodule (region "
                f"{name!r}); rename the region."
            )
        if used is None:
            used = _paths(gm.graph.nodes)
        if name in used:
            raise RegionError(
                f"The module already has a submodule {name!r} that its graph still uses; rename "
                "the region."
            )


def _check_holder(gm: GraphModule, path: str) -> None:
    value: object = gm
    for part in path.split(".") if path else ():
        if not hasattr(value, part):
            return
        value = getattr(value, part)
        if not isinstance(value, torch.nn.Module):
            raise RegionError(
                f"The region's path leads through {part!r}, which is not a submodule; rename the "
                "region."
            )


def _paths(nodes: Iterable[Node]) -> set[str]:
    """Return all attribute paths read by ``nodes``, with their prefixes."""
    paths: set[str] = set()
    for node in nodes:
        if node.op in {"call_module", "get_attr"}:
            path = str(node.target)
            while path and path not in paths:
                paths.add(path)
                path = path.rpartition(".")[0]
    return paths


def check_attributes(gm: GraphModule, tree: RegionTree) -> None:
    """Raise unless ``gm`` has every attribute that the regions read."""
    for node in tree.region_of:
        if node.op in {"get_attr", "call_module"} and attribute_of(gm, node) is None:
            raise RegionError(
                f"Node {node.name!r} reads attribute {node.target!r}, which the module does not "
                "have."
            )


def check_inner_names(tree: RegionTree) -> None:
    """Raise if a region has the name of an attribute of its parent module."""
    for index, children in enumerate(tree.children):
        if not children or index == ROOT:
            continue
        used = _paths(tree.members[index])
        for child in children:
            name = tree.name(child) or ""
            # A name such as "graph" would hide an attribute of GraphModule.
            if name in used or hasattr(GraphModule, name.split(".")[0]):
                raise RegionError(
                    f"Region {name!r} has the name of an existing attribute of its parent "
                    "module; rename the region."
                )


def checked_order(order: Iterable[tuple[Node, Node]], tree: RegionTree) -> list[tuple[Node, Node]]:
    """Return the caller's node pairs after checking that the graph has them in this order."""
    pairs = list(order)
    for before, after in pairs:
        if tree.position.get(before, -1) >= tree.position.get(after, -1):
            raise RegionError(
                f"order has {before.name!r} before {after.name!r}; expected two nodes that are in "
                "this order in the graph."
            )
    return pairs
