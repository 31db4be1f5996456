"""Pattern matching that restores decomposed operators."""

from lowerdeck.xnnpack.patterns.rewriting import MatchedGraph, match_patterns

__all__ = ["MatchedGraph", "match_patterns"]
