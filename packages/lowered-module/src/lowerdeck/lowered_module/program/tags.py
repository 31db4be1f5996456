"""Keys of ``node.meta`` under which partitioning keeps what it says of a node."""

from __future__ import annotations

DELEGATION_TAG = "delegation_tag"
"""Under it a partitioner writes the name of a node's partition."""

CHANGED_ELSEWHERE = "lowerdeck_changed_elsewhere"
"""Of a placeholder: another method of the same file changes what it holds."""

USED_ELSEWHERE = "lowerdeck_used_elsewhere"
"""Of a placeholder: another method of the same file uses what it holds."""

REJECT = "lowerdeck.reject"
"""Under it a partitioner leaves the reason for leaving a node alone."""

AHEAD = "lowerdeck.ahead"
"""Of a call that no input changes: its backend is given what it computes as a constant."""

REMARKS = "lowerdeck.remarks"
"""Under it stands what a partitioner says of a node it took: reasons by heading."""

DECISION = "lowerdeck.decision"
"""What a partitioner decided for a call and the ``preprocess`` of its backend reads: plain data.

Calls keep it in the partition's program, for executors too; results in a cache depend on it.
"""
