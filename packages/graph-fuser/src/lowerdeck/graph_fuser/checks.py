"""What must hold before anything changes, beside the shape of the tree."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

from lowerdeck.graph_fuser.attributes import attribute, has_attribute
from lowerdeck.graph_fuser.boundary import Boundary
from lowerdeck.graph_fuser.errors import NameInUseError, RegionError
from lowerdeck.graph_fuser.regions import ROOT, RegionTree


def check_names(gm: GraphModule | None, tree: RegionTree) -> None:
    """Raise unless siblings have different names, and the outermost ones are free in ``gm``."""
    for index, children in enumerate(tree.children):
        names: set[str] = set()
        for child in children:
            name = tree.name(child) or ""
            if not name or any(not part for part in name.split(".")):
                raise RegionError(
                    f"Region name {name!r} is no attribute path; expected one or more non-empty "
                    "parts "
                    "joined by dots."
                )
            if name in names:
                raise NameInUseError(
                    f"Two sibling regions are named {name!r}; give each its own name."
                )
            names.add(name)
            if index == ROOT and gm is not None:
                check_free(gm, name)


def check_free(gm: GraphModule, name: str) -> None:
    """Raise ``NameInUseError`` unless a submodule may be installed under ``name``."""
    if not has_attribute(gm, name):
        return
    if not isinstance(attribute(gm, name), torch.nn.Module):
        raise NameInUseError(
            f"The module already has an attribute {name!r} that is no submodule; rename the "
            "region."
        )
    if any(
        node.op in {"call_module", "get_attr"} and f"{node.target}.".startswith(f"{name}.")
        for node in gm.graph.nodes
    ):
        raise NameInUseError(
            f"The module already has a submodule {name!r} that its graph still uses; rename the "
            "region."
        )


def check_attributes(
    gm: GraphModule,
    tree: RegionTree,
    boundary: Boundary,
) -> None:
    """Raise unless ``gm`` has every attribute that the regions read."""
    for index in range(1, len(tree.regions)):
        reads = [node for node in tree.members[index] if node.op in {"get_attr", "call_module"}]
        for node in (*reads, *boundary.local[index]):
            if node.op == "placeholder":
                raise RegionError(
                    f"attribute_name gives placeholder {node.name!r} a name in region "
                    f"{tree.name(index)!r}, "
                    "but its value is not known here; pass make_module too and install it there."
                )
            if not has_attribute(gm, str(node.target)):
                raise RegionError(
                    f"Node {node.name!r} reads attribute {node.target!r}, which the module does "
                    "not have."
                )


def checked_order(order: Iterable[tuple[Node, Node]], tree: RegionTree) -> list[tuple[Node, Node]]:
    """Return the caller's pairs of nodes, all in the graph and in this order already."""
    pairs = list(order)
    for before, after in pairs:
        if tree.position.get(before, -1) >= tree.position.get(after, -1):
            raise RegionError(
                f"order asks for {before.name!r} before {after.name!r}; expected two nodes of the "
                "graph "
                "that stand in this order already."
            )
    return pairs
