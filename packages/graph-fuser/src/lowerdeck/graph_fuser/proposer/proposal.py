"""Proposed partitions, with a reason for each excluded node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from torch.fx import Node


class Reason(StrEnum):
    """Why a node is in no partition."""

    NOT_COMPUTED = "not_computed"
    """The node is an input or the output of the graph."""
    NOT_SUPPORTED = "not_supported"
    """``is_supported`` returned False."""
    FOLLOWS_PRODUCER = "follows_producer"
    """The node is a getitem of an excluded producer."""
    GROUP_NOT_SUPPORTED = "group_not_supported"
    """Another node of the same group is left out."""
    GROUP_IN_CYCLE = "group_in_cycle"
    """The node's group is not convex: a path leaves and reenters it through unsupported nodes."""
    TOO_SMALL = "too_small"
    """The node's partition would have fewer computing nodes than ``min_nodes``."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Why a node was excluded.

    Attributes:
        reason: The kind of reason.
        detail: Message with the deciding node or number.
    """

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, repr=False)
class Proposal:
    """Partitions that can all be fused.

    Attributes:
        partitions: Nodes of each partition in graph order; partitions in topological order.
        left_out: Reason for each excluded node.
    """

    partitions: tuple[tuple[Node, ...], ...]
    left_out: Mapping[Node, LeftOut] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the counts, not the nodes."""
        inside = sum(map(len, self.partitions))
        return f"Proposal({inside} nodes in {len(self)} partitions, {len(self.left_out)} left out)"

    def __iter__(self) -> Iterator[tuple[Node, ...]]:
        """Iterate over the partitions."""
        return iter(self.partitions)

    def __len__(self) -> int:
        """Return the number of partitions."""
        return len(self.partitions)

    def named(self, prefix: str = "fused_") -> dict[str, tuple[Node, ...]]:
        """Return the partitions by numbered name, for ``fuse_partitions``."""
        return {f"{prefix}{number}": nodes for number, nodes in enumerate(self.partitions)}
