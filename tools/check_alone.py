"""Check, inside a clean environment, that one installed package stands on what it declares."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import sys
from pathlib import Path

BRAND = "lowerdeck"


def main(package: str, *siblings: str) -> None:
    """Import every module of ``package`` and compare what is installed with what is declared.

    Raises:
        SystemExit: With one line for each thing that is wrong.
    """
    name = f"{BRAND}.{package.replace('-', '_')}"
    root = importlib.import_module(name)
    location = Path(root.__file__ or "")
    for module in pkgutil.walk_packages(root.__path__, f"{name}."):
        importlib.import_module(module.name)
    names = {str(d.metadata["Name"]) for d in importlib.metadata.distributions()}
    installed = {n for n in names if n.startswith(f"{BRAND}-")}
    expected = {f"{BRAND}-{p}" for p in (package, *siblings)}
    problems = []
    if "site-packages" not in location.parts:
        problems.append(f"{name} was imported from the sources: {location}")
    if not (location.parent / "py.typed").exists():
        problems.append(f"py.typed was not packaged beside {location}")
    if installed != expected:
        problems.append(f"installed {sorted(installed)}, declared {sorted(expected)}")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main(*sys.argv[1:])
