"""Lets the tests import the modules of this folder, wherever the folder was copied to."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
