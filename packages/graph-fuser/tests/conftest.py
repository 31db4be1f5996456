"""Lets the tests share ``fuser_graphs`` and ``fuser_oracle`` wherever this folder is copied."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
