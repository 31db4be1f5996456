"""``lowerdeck doctor``: check installed packages, their requirements, and the runtime."""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lowerdeck.inspect.commands.answers import ExitStatus, say
from lowerdeck.inspect.commands.known import COMMANDS

_RUNTIME = "executorch"
# Up to release 1.4.1, and from 1.5 on.
_BINDINGS = tuple(f"executorch.extension.pybindings.{name}" for name in ("_portable_lib", "_C"))
_GROUP = "lowerdeck.commands"
_LOAD = """import json, sys
from importlib.metadata import EntryPoint
for target in json.loads(sys.argv[1]):
    EntryPoint("", target, "").load()"""
_SECONDS = 120.0
"""On a slow disk the first import of torch takes half a minute."""


class DoctorCommand:
    """Reports what is installed, what is missing, and what cannot be imported."""

    help = "check the installation"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add no arguments."""

    def run(self, args: argparse.Namespace) -> int:  # noqa: ARG002
        """Print the report.

        Returns:
            ``DONE``; ``FAILED`` if a package of Lowerdeck lacks a requirement or cannot be
            imported.
        """
        installed: dict[str, Distribution] = {}
        for distribution in distributions():
            # Of two with one name, Python imports the first.
            canonical = canonicalize_name(distribution.metadata["Name"] or "")
            installed.setdefault(canonical, distribution)
        ours = {
            name: distribution
            for name, distribution in sorted(installed.items())
            if re.match("lowerdeck(-|$)", name)
        }
        targets = {name: _targets(name, distribution) for name, distribution in ours.items()}
        binding = _binding()
        if binding is not None and {_RUNTIME, "torch"} <= installed.keys():
            targets[_RUNTIME] = ["torch", binding]
        failures = import_failures(targets)
        lines = [f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"]
        healthy, commands = True, set[str]()
        for name, distribution in ours.items():
            own = [entry.name for entry in distribution.entry_points if entry.group == _GROUP]
            commands.update(own)
            lines.append(
                f"{name} {distribution.version}"
                + (f"  (lowerdeck {', '.join(own)})" if own else "")
            )
            for missing, extra in _unmet(distribution, installed):
                healthy = healthy and bool(extra)
                lines.append(f"  {f'for [{extra}]' if extra else 'MISSING'}: {missing}")
            if name in failures:
                healthy = False
                lines.append(f"  CANNOT BE IMPORTED: {_with_advice(failures[name], installed)}")
        lines += (
            f"no `lowerdeck {command}`: pip install {package}"
            for command, (package, _) in COMMANDS.items()
            if command not in commands and package != "lowerdeck-inspect"
        )
        lines.append(_runtime_line(installed, failures.get(_RUNTIME)))
        say(*lines)
        return ExitStatus.DONE if healthy else ExitStatus.FAILED


def import_failures(
    targets: Mapping[str, list[str]], *, seconds: float = _SECONDS
) -> dict[str, str]:
    """Import packages in other processes and return the tracebacks of those that fail.

    Args:
        targets: By package, ``"module"`` or ``"module:attribute"`` strings to import.
        seconds: Time limit of each process.
    """
    # Together first: each process that imports torch takes seconds.
    if _import_failure([target for own in targets.values() for target in own], seconds) is None:
        return {}
    failures = {name: _import_failure(own, seconds) for name, own in targets.items()}
    return {name: failure for name, failure in failures.items() if failure is not None}


def _import_failure(targets: list[str], seconds: float) -> str | None:
    try:
        process = subprocess.run(
            # Without the current folder, which the `lowerdeck` script does not search either.
            [sys.executable, "-P", "-c", _LOAD, json.dumps(targets)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing it did not end within {seconds:g} s"
    if process.returncode == 0:
        return None
    # The first traceback is the root cause of those that follow it.
    traceback = process.stderr.partition("Traceback (most recent call last):\n")[2]
    return traceback or f"importing it ends the process with status {process.returncode}"


def _targets(name: str, distribution: Distribution) -> list[str]:
    if name == "lowerdeck":  # It has no code.
        return []
    return [
        f"lowerdeck.{name.removeprefix('lowerdeck-').replace('-', '_')}",
        *sorted(
            {
                entry.value
                for entry in distribution.entry_points
                if entry.group.startswith("lowerdeck.") and ":" in entry.value
            }
        ),
    ]


def _with_advice(traceback: str, installed: Mapping[str, Distribution]) -> str:
    """Return the error of a traceback in one line, and what to install."""
    frames, reason = [], ""
    for line in traceback.splitlines():
        if not line.startswith(" "):
            reason = line
            break
        frames += re.findall(r"site-packages[/\\](\w+)", line)
    missing = re.match(r"ModuleNotFoundError: No module named '(\w+)", reason)
    if missing is not None:
        return f"{reason}; pip install {canonicalize_name(missing[1])}"
    others = [frame for frame in frames if frame not in {"torch", "lowerdeck"}]
    culprit = installed.get(canonicalize_name(others[-1])) if others else None
    if culprit is None:
        return f"{reason}; pip install --force-reinstall it and its requirements"
    name = culprit.metadata["Name"]
    torch = installed.get("torch")
    return (
        f"{reason}, raised by {name} {culprit.version}"
        f"{f' beside torch {torch.version}' if torch else ''}; install versions that fit each "
        f"other, from one index (pip install --upgrade {name}), or pip uninstall {name}"
    )


def _unmet(
    distribution: Distribution, installed: Mapping[str, Distribution]
) -> Iterator[tuple[str, str]]:
    """Yield each unmet requirement with a command to meet it, and the extra it belongs to."""
    extras = distribution.metadata.get_all("Provides-Extra") or []
    for text in distribution.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        for extra in ("", *extras):
            if marker is None or marker.evaluate({"extra": extra}):
                break
        else:
            continue  # For another version of Python or another system.
        wanted = f"{requirement.name}{requirement.specifier}"
        found = installed.get(canonicalize_name(requirement.name))
        if found is None:
            yield f"{wanted}: pip install '{wanted}'", extra
        elif not requirement.specifier.contains(found.version, prereleases=True):
            yield f"{wanted}, found {found.version}: pip install '{wanted}'", extra


def _binding() -> str | None:
    try:
        return next((name for name in _BINDINGS if find_spec(name) is not None), None)
    except ImportError:
        return None


def _runtime_line(installed: Mapping[str, Distribution], failure: str | None) -> str:
    if _RUNTIME not in installed:
        return (
            "official runtime: not installed; files run in the emulation of lowerdeck-runner: "
            "pip install executorch"
        )
    line = f"official runtime: executorch {installed[_RUNTIME].version}"
    if failure is not None:
        return f"{line}, CANNOT BE IMPORTED: {_with_advice(failure, installed)}"
    binding = "with" if _binding() else "WITHOUT"
    needs = "" if "torch" in installed else ", which needs torch: pip install torch"
    return f"{line}, {binding} its Python binding{needs}"


command = DoctorCommand()
