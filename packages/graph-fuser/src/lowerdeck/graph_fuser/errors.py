"""Exceptions of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Node


class GraphFuserError(Exception):
    """Base class of the exceptions of ``lowerdeck.graph_fuser``."""


class RegionError(GraphFuserError, ValueError):
    """Nodes cannot be outlined, inlined, erased or partitioned; the message gives the reason."""


class CycleError(RegionError, RuntimeError):
    """A graph has a dependency cycle, or outlining would create one.

    Also a ``RuntimeError``, for callers that catch the error of torch's ``legalize_graph``.

    Attributes:
        path: Nodes of the cycle; the first and last are one node, or nodes of one region.
            Neighbours are joined by a graph edge or are nodes of one region.
        regions: Region name of each node in ``path``, or None.
    """

    def __init__(
        self, message: str, path: tuple[Node, ...], regions: tuple[str | None, ...]
    ) -> None:
        super().__init__(message)
        self.path = path
        self.regions = regions
