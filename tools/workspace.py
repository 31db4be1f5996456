"""What the workspace holds: its packages, what each declares, and which commit each release is."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BRAND = "lowerdeck"

# Lowest layer first, so that a list of them is an order to install in.
PACKAGES = (
    "graph-fuser",
    "serializer",
    "emitter",
    "runner",
    "unflatten",
    "lowered-module",
    "demo-backends",
)
TORCH_FREE = frozenset({"serializer"})

_PIN = re.compile(rf"{BRAND}-([a-z-]+)>=(\d+\.\d+\.\d+),<")


def import_name(package: str) -> str:
    """Return the folder name under ``lowerdeck`` that ``package`` installs."""
    return package.replace("-", "_")


def project(package: str) -> dict[str, Any]:
    """Return the ``[project]`` table of a package."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table


def sibling_pins(package: str) -> dict[str, str]:
    """Return the lower bound of each sibling that a package declares itself."""
    matches = (_PIN.match(requirement) for requirement in project(package)["dependencies"])
    return {match[1]: match[2] for match in matches if match}


def siblings(package: str) -> set[str]:
    """Return the sibling packages that a package declares, transitively."""
    found: set[str] = set()
    for other in sibling_pins(package):
        found |= {other} | siblings(other)
    return found


def git(*args: str) -> str:
    """Return what a git command prints, stripped.

    Raises:
        subprocess.CalledProcessError: The command failed.
    """
    return subprocess.run(
        ["git", *args], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def releases() -> dict[str, dict[str, str]]:
    """Return ``{package: {version: commit}}`` as ``releases.toml`` records it."""
    path = ROOT / "releases.toml"
    return tomllib.loads(path.read_text()) if path.exists() else {}


def released_commit(package: str, version: str) -> str | None:
    """Return the commit of a release, or None; make its tag where a clone lacks it.

    Tags do not travel with every clone, the file does: it is the record, the tag a convenience.
    """
    commit = releases().get(package, {}).get(version)
    if commit is None:
        return None
    tag = f"{package}-v{version}"
    if tag not in git("tag", "--list", tag).splitlines():
        git("tag", tag, commit)
    return commit
