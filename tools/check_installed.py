"""Check, inside a clean environment, that the installed packages stand on what they declare."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

BRAND = "lowerdeck"
# What a distribution has beside its package: the script must not have to read one to begin.
BESIDE = {"inspect": {"script"}}


def main(*packages: str) -> None:
    """Import every module of ``packages`` and compare what is installed with these names.

    Raises:
        SystemExit: With one line for each thing that is wrong.
    """
    problems = [problem for package in packages for problem in module_problems(package)]
    problems += distribution_problems(set(packages))
    problems += command_problems("inspect" in packages)
    if problems:
        sys.exit("\n".join(problems))


def module_problems(package: str) -> list[str]:
    """Import every module of one package, from the installed files."""
    name = f"{BRAND}.{package.replace('-', '_')}"
    root = importlib.import_module(name)
    location = Path(root.__file__ or "")
    for module in pkgutil.walk_packages(root.__path__, f"{name}."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            # A module that stands on an extra says so; the package itself must not.
            if (error.name or "").partition(".")[0] not in extras_of(package):
                raise
    problems = []
    if "site-packages" not in location.parts:
        problems.append(f"{name} was imported from the sources: {location}")
    if not (location.parent / "py.typed").exists():
        problems.append(f"py.typed was not packaged beside {location}")
    return problems


def extras_of(package: str) -> set[str]:
    """Return the names that a distribution needs for its extras alone."""
    declared = importlib.metadata.requires(f"{BRAND}-{package}") or []
    matches = (re.match(r"[\w-]+", line) for line in declared if "extra ==" in line)
    return {match[0].replace("-", "_") for match in matches if match}


def distribution_problems(packages: set[str]) -> list[str]:
    """Compare distributions and importable names with what was asked for and its dependencies."""
    names = {str(d.metadata["Name"]) for d in importlib.metadata.distributions()}
    installed = {n for n in names if n.startswith(f"{BRAND}-")}
    expected = {f"{BRAND}-{p}" for p in packages}
    importable = {m.name for m in pkgutil.iter_modules(importlib.import_module(BRAND).__path__)}
    problems = []
    if installed != expected:
        problems.append(f"installed {sorted(installed)}, declared {sorted(expected)}")
    own = {p.replace("-", "_") for p in packages}.union(*(BESIDE.get(p, ()) for p in packages))
    if importable != own:
        problems.append(f"importable {sorted(importable)}, declared {sorted(packages)}")
    return problems


def command_problems(has_script: bool) -> list[str]:
    """Compare what ``lowerdeck --help`` lists with the entry points, each of which must load."""
    script = Path(sysconfig.get_path("scripts")) / BRAND
    entry_points = importlib.metadata.entry_points(group=f"{BRAND}.commands")
    for entry_point in entry_points:
        entry_point.load()
    if not has_script:
        return [f"{script} is there without the package that brings it"] * script.exists()
    shown = subprocess.run([script, "--help"], capture_output=True, text=True, check=True).stdout
    listed = {line.split()[0] for line in shown.splitlines() if line.startswith("  ")}
    expected = {entry_point.name for entry_point in entry_points}
    return [] if listed == expected else [f"--help lists {sorted(listed)}, not {sorted(expected)}"]


if __name__ == "__main__":
    main(*sys.argv[1:])
