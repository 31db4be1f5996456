"""Keys of ``node.meta`` for partitioning."""

from __future__ import annotations

DELEGATION_TAG = "delegation_tag"
"""Name of a node's partition, set by a partitioner."""

CHANGED_ELSEWHERE = "lowerdeck_changed_elsewhere"
"""On a placeholder: another method of the same file mutates its tensor."""

USED_ELSEWHERE = "lowerdeck_used_elsewhere"
"""On a placeholder: another method of the same file uses its tensor."""

REJECT = "lowerdeck.reject"
"""Reason why a node is not delegated."""

AHEAD = "lowerdeck.ahead"
"""On a folded call: its backend gets the result as a constant."""

REMARKS = "lowerdeck.remarks"
"""A partitioner's remarks on a delegated node: reasons by heading."""

DECISION = "lowerdeck.decision"
"""A partitioner's decision on a call, for the ``preprocess`` of its backend: plain data.

It is kept in the partition's program, also in executors, and is part of cache keys.
"""
