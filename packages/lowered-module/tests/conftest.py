"""Lets the tests import the module beside them, wherever the folder was copied to."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
