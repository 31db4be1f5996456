"""Pattern matching that restores decomposed operators before compilation."""

from lowerdeck.xnnpack.recognise.rewriting import Recognised, recognised

__all__ = ["Recognised", "recognised"]
