"""Partition proposals."""

from lowerdeck.graph_fuser.proposer.proposal import LeftOut, Proposal, Reason
from lowerdeck.graph_fuser.proposer.propose import propose_partitions

__all__ = ["LeftOut", "Proposal", "Reason", "propose_partitions"]
