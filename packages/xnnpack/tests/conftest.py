"""Lets the tests import the modules beside them, and checks every payload that they compile."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from payload_moves import payloads_have_no_mergeable_moves  # type: ignore[import-not-found]

__all__ = ["payloads_have_no_mergeable_moves"]
