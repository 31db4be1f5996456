"""The errors that this package raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Node


class GraphFuserError(Exception):
    """Base of every error that ``lowerdeck.graph_fuser`` raises on purpose."""


class RegionError(GraphFuserError, ValueError):
    """A list of nodes, or a tree of regions, cannot be outlined as it is."""


class ForeignNodeError(RegionError):
    """A node belongs to another graph."""


class ErasedNodeError(RegionError):
    """A node was erased from its graph."""


class DuplicateNodeError(RegionError):
    """A node is twice in one list."""


class OverlapError(RegionError):
    """A node is in two regions."""


class NodeInUseError(RegionError):
    """A node that is to be erased is read by one that stays."""


class InlineError(GraphFuserError, ValueError):
    """A call cannot be replaced by the graph that it calls."""


class NameInUseError(RegionError):
    """A submodule's name is taken by something that the graph still uses."""


class CycleError(RegionError, RuntimeError):
    """Outlining would make a graph that depends on itself, or a graph does already.

    A ``RuntimeError`` too: that is what torch's ``legalize_graph`` raises, so that code written
    for it catches this one.

    Attributes:
        path: The offending path, node by node. It starts and ends in the same region. Two
            neighbours are either an edge of the graph or two nodes of one region, which the
            submodule would tie together.
        regions: For each node of ``path`` the name of its region, or None where it is in none.
    """

    def __init__(
        self, message: str, path: tuple[Node, ...], regions: tuple[str | None, ...]
    ) -> None:
        super().__init__(message)
        self.path = path
        self.regions = regions
