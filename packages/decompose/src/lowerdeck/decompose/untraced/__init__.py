"""Templates of calls that need no tracing."""

from lowerdeck.decompose.untraced.identities import Before, recorded
from lowerdeck.decompose.untraced.resized import Resized

__all__ = ["Before", "Resized", "recorded"]
