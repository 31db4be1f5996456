"""Operators that came apart: found in their pieces, and compiled as if they were whole."""

from lowerdeck.xnnpack.recognise.rewriting import Recognised, recognised

__all__ = ["Recognised", "recognised"]
