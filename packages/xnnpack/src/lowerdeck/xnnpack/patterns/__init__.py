"""Pattern matching that restores decomposed operators before compilation."""

from lowerdeck.xnnpack.patterns.replacements import Replacement, replace_again, replacements_of
from lowerdeck.xnnpack.patterns.rewriting import MatchedGraph, match_patterns

__all__ = ["MatchedGraph", "Replacement", "match_patterns", "replace_again", "replacements_of"]
