"""The errors that this package raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Node


class GraphFuserError(Exception):
    """Base of every error that ``lowerdeck.graph_fuser`` raises on purpose."""


class RegionError(GraphFuserError, ValueError):
    """Nodes cannot be outlined, inlined, erased or partitioned as asked; the message says why."""


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
