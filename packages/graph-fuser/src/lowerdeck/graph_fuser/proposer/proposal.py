"""A proposal: partitions, and the reason why each other node is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from torch.fx import Node


class Reason(StrEnum):
    """Why a node is in no partition."""

    NOT_COMPUTED = "not_computed"
    """It is an input or the output of the graph."""
    NOT_SUPPORTED = "not_supported"
    """``is_supported`` said no."""
    FOLLOWS_PRODUCER = "follows_producer"
    """It takes an element of a value whose producer is left out."""
    GROUP_NOT_SUPPORTED = "group_not_supported"
    """Another node of its group is not supported."""
    GROUP_IN_CYCLE = "group_in_cycle"
    """Its group cannot be one call: a path leaves it through unsupported nodes and returns."""
    TOO_SMALL = "too_small"
    """Its partition would have fewer computing nodes than ``min_nodes``."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Why one node was left out.

    Attributes:
        reason: The kind of reason.
        detail: A sentence for people, naming the node or the number that decided.
    """

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, repr=False)
class Proposal:
    """Partitions that may all be fused together.

    Attributes:
        partitions: The nodes of each partition in the graph's order; partitions in an order in
            which none needs a later one.
        left_out: Why each other node of the graph is in none.
    """

    partitions: tuple[tuple[Node, ...], ...]
    left_out: Mapping[Node, LeftOut] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the counts; the nodes of a large graph would fill pages."""
        inside = sum(map(len, self.partitions))
        return f"Proposal({inside} nodes in {len(self)} partitions, {len(self.left_out)} left out)"

    def __iter__(self) -> Iterator[tuple[Node, ...]]:
        """Iterate over the partitions."""
        return iter(self.partitions)

    def __len__(self) -> int:
        """Return the number of partitions."""
        return len(self.partitions)

    def named(self, prefix: str = "fused_") -> dict[str, tuple[Node, ...]]:
        """Return the partitions under numbered names, as ``fuse_partitions`` wants them."""
        return {f"{prefix}{number}": nodes for number, nodes in enumerate(self.partitions)}
