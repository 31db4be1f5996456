"""Calls that are told without tracing them."""

from lowerdeck.decompose.untraced.identities import Before, recorded
from lowerdeck.decompose.untraced.resized import Resized

__all__ = ["Before", "Resized", "recorded"]
