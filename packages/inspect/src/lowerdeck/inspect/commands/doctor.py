"""``lowerdeck doctor``: check that the installed packages and the runtime can be imported."""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import Distribution, EntryPoint, distributions

from lowerdeck.inspect.commands.answers import ExitStatus, say

_RUNTIME = "executorch"
_RUNTIME_NEEDS = "pip install numpy ruamel.yaml flatbuffers tabulate"
_GROUP = "lowerdeck.commands"
_IS_OURS = re.compile("lowerdeck(-|$)")
# Each target is printed before its import, so that the last one is known if the process aborts.
_LOAD = """import sys
from importlib.metadata import EntryPoint
for target in sys.argv[1:]:
    print(target, flush=True)
    try:
        EntryPoint("", target, "").load()
    except BaseException as error:
        print(" ", type(error).__name__, error, flush=True)
print("done")"""
_SECONDS = 300.0
"""Time limit of imports: on a slow disk the first import of torch takes half a minute."""


class DoctorCommand:
    """Reports what is installed, and what cannot be imported.

    Other packages with Lowerdeck commands or backends are included.
    """

    help = "check the installation"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add no arguments."""

    def run(self, args: argparse.Namespace) -> int:  # noqa: ARG002
        """Print the report.

        Returns:
            ``DONE``; ``FAILED`` if a package cannot be imported.
        """
        installed: dict[str, Distribution] = {}
        for distribution in distributions():
            # Of distributions with the same name Python imports the first.
            installed.setdefault(distribution.metadata["Name"] or "", distribution)
        ours = [
            name
            for name, distribution in sorted(installed.items())
            if _IS_OURS.match(name) or any(map(_extends, distribution.entry_points))
        ]
        targets = {name: _targets(name, installed[name]) for name in ours}
        if _RUNTIME in installed:
            targets[_RUNTIME] = ["executorch.runtime"]
        failures = import_failures(targets)
        lines = [f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"]
        for name in ours:
            own = [point.name for point in installed[name].entry_points.select(group=_GROUP)]
            suffix = f"  (lowerdeck {', '.join(own)})" if own else ""
            lines.append(f"{name} {installed[name].version}{suffix}")
            if name in failures:
                lines.append(f"  CANNOT BE IMPORTED: {failures[name]}")
        runtime = (
            "not installed, so the runner emulates it: pip install --no-deps executorch adds it"
        )
        if _RUNTIME in installed:
            runtime = f"executorch {installed[_RUNTIME].version}"
        if _RUNTIME in failures:
            runtime += (
                f", whose executorch.runtime CANNOT BE IMPORTED (lowerdeck does not need it): "
                f"{failures[_RUNTIME]}; try {_RUNTIME_NEEDS}"
            )
        say(*lines, f"official runtime: {runtime}")
        return ExitStatus.FAILED if failures.keys() - {_RUNTIME} else ExitStatus.DONE


def import_failures(
    targets: Mapping[str, list[str]], *, seconds: float = _SECONDS
) -> dict[str, str]:
    """Import packages in another process and return why imports failed, by package.

    Args:
        targets: ``"module"`` or ``"module:attribute"`` strings to import, by package.
        seconds: Time limit of the process.
    """
    owners = {target: name for name, own in targets.items() for target in own}
    # Without the current folder in the search path, as in the `lowerdeck` script.
    command = [sys.executable, "-P", "-c", _LOAD, *owners]
    try:
        process = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
        printed, end = (
            process.stdout,
            f"importing it aborts the process with status {process.returncode}",
        )
    except subprocess.TimeoutExpired as error:
        printed, end = error.stdout or b"", f"importing it takes more than {seconds:g} s"
    failures: dict[str, str] = {}
    last = ""
    for line in printed.decode(errors="replace").splitlines():
        if line in owners or line == "done":
            last = line
        elif line.startswith("  ") and last in owners:
            failures.setdefault(owners[last], line.strip())
    return failures if last == "done" or not owners else {**failures, owners[last]: end}


def _targets(name: str, distribution: Distribution) -> list[str]:
    if name == "lowerdeck":  # It contains no code.
        return []
    entries = [entry for entry in distribution.entry_points if ":" in entry.value]
    values = {
        entry.value for entry in entries if _extends(entry) or entry.value.startswith("lowerdeck.")
    }
    modules = [name.replace("-", ".", 1).replace("-", "_")] if _IS_OURS.match(name) else []
    return [*modules, *sorted(values)]


def _extends(entry: EntryPoint) -> bool:
    """Return whether an entry point is a command or belongs to a backend."""
    return entry.group.startswith("lowerdeck.")


command: DoctorCommand = DoctorCommand()
