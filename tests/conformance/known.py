"""Differences that are a kernel's own, or torch's, with their reasons."""

from __future__ import annotations

import tomllib
from pathlib import Path

_FILE = Path(__file__).parent / "known_differences.toml"
DIFFERS: dict[str, str] = tomllib.loads(_FILE.read_text())["differs"]
FORMS: dict[str, str] = tomllib.loads(_FILE.read_text()).get("forms", {})
KNOWN = DIFFERS | FORMS
UNORDERED: frozenset[str] = frozenset(tomllib.loads(_FILE.read_text())["unordered"]["operators"])
