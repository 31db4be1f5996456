"""Fixtures of this suite."""

from __future__ import annotations

import sys
from pathlib import Path

from lowerdeck_files.shell import shell

__all__ = ["shell"]
sys.path.insert(0, str(Path(__file__).parent))
