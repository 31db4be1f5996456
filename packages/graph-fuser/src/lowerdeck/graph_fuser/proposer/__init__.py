"""Proposals of partitions."""

from lowerdeck.graph_fuser.proposer.proposal import LeftOut, Proposal, Reason
from lowerdeck.graph_fuser.proposer.propose import propose_partitions
from lowerdeck.graph_fuser.proposer.targets import qualified_name

__all__ = ["LeftOut", "Proposal", "Reason", "propose_partitions", "qualified_name"]
