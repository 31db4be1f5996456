"""Turn groups of torch.fx nodes into submodules, in one linear pass."""

from lowerdeck.graph_fuser.errors import GraphFuserError

__all__ = ["GraphFuserError"]
