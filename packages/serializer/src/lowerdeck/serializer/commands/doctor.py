"""``lowerdeck doctor``: what is installed and can be loaded, what it lacks, and which runtime."""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, distributions

from lowerdeck.serializer.commands.answers import ExitStatus, say
from lowerdeck.serializer.commands.loading import Failure, failures
from lowerdeck.serializer.installed import plain_name
from lowerdeck.serializer.official_runtime import official_binding_name

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*([^;]*)(?:;(.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")
_BOUND = re.compile(r"(>=|<)\s*([0-9.]+)")
_MISSING = re.compile(r"^ModuleNotFoundError: No module named '([^']+)'")
_COMMANDS = "lowerdeck.commands"
_BRINGS = {
    "lower": "lowerdeck-lowered-module",
    "run": "lowerdeck-runner",
    "bundle": "lowerdeck-runner",
    "backends": "lowerdeck-runner",
    "lm": "lowerdeck-language-models",
}
"""Who brings the commands that another package of ours has."""
_RUNTIME = "executorch"


class DoctorCommand:
    """Tells what is installed and what is missing for what."""

    help = "tell what is installed, which runtime is there, and what is missing for what"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add no arguments.

        Args:
            parser: The parser of this command.
        """

    def run(self, args: argparse.Namespace) -> int:  # noqa: ARG002
        """Print it; what is told of is imported in a process of its own.

        Args:
            args: The parsed arguments.

        Returns:
            ``DONE``; ``FAILED`` where a package of ours lacks what it requires, or cannot be
            loaded.
        """
        # The first of a name is the one that is imported.
        found: dict[str, Distribution] = {}
        for one in distributions():
            found.setdefault(plain_name(one.metadata["Name"] or ""), one)
        lines = [f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"]
        commands: set[str] = set()
        ours = sorted(name for name in found if re.match("lowerdeck(-|$)", name))
        broken = failures(_targets({name: found[name] for name in ours}, found))
        lacks = any(name in broken for name in ours)
        for name in ours:
            own = [one.name for one in found[name].entry_points if one.group == _COMMANDS]
            commands.update(own)
            brings = f"  (lowerdeck {', '.join(own)})" if own else ""
            lines.append(f"{name} {found[name].version}{brings}")
            for missing, extra in _unmet(found[name], found):
                lacks = lacks or extra is None
                wanted = f"for [{extra}]" if extra else "MISSING"
                lines.append(f"  {wanted}: {missing}")
            if name in broken:
                lines.append(f"  INSTALLED BUT CANNOT BE LOADED: {_told(broken[name], found)}")
        lines += (
            f"no `lowerdeck {command}`: pip install {package}"
            for command, package in _BRINGS.items()
            if command not in commands
        )
        lines.append(_runtime(found, broken.get(_RUNTIME)))
        say(*lines)
        return ExitStatus.FAILED if lacks else ExitStatus.DONE


def _targets(
    ours: Mapping[str, Distribution], found: Mapping[str, Distribution]
) -> dict[str, list[str]]:
    """Return what to load of each part, and of the official runtime."""
    wanted = {}
    for name, one in ours.items():
        if name != "lowerdeck":  # it has no code
            module = f"lowerdeck.{name.removeprefix('lowerdeck-').replace('-', '_')}"
            offered = {
                entry.value
                for entry in one.entry_points
                if entry.group.startswith("lowerdeck.") and ":" in entry.value
            }
            wanted[name] = [module, *sorted(offered)]
    binding = official_binding_name()
    if {_RUNTIME, "torch"} <= set(found) and binding is not None:
        wanted[_RUNTIME] = ["torch", binding]
    return wanted


def _told(failure: Failure, found: Mapping[str, Distribution]) -> str:
    """Return why a part cannot be loaded, and what to do."""
    missing = _MISSING.search(failure.reason)
    if missing is not None:
        return f"{failure.reason}; pip install {plain_name(missing[1].partition('.')[0])}"
    culprit = found.get(plain_name(failure.culprit))
    if culprit is None:
        return f"{failure.reason}; pip install --force-reinstall it and what it needs"
    name = plain_name(failure.culprit)
    torch = found.get("torch")
    beside = f" beside torch {torch.version}" if torch is not None else ""
    return (
        f"{failure.reason}, raised by {name} {culprit.version}{beside}; install versions that "
        f"fit each other, from one index (pip install --upgrade {name}), or pip uninstall {name} "
        "if nothing of yours needs it"
    )


def _unmet(
    one: Distribution, found: Mapping[str, Distribution]
) -> Iterator[tuple[str, str | None]]:
    """Yield what a distribution requires and lacks, with the extra that asks for it."""
    for requirement in one.requires or ():
        parts = _REQUIREMENT.fullmatch(requirement.strip())
        if parts is None:
            continue
        name, bounds, marker = plain_name(parts[1]), parts[2].strip(" ()"), parts[3] or ""
        extra = _EXTRA.search(marker)
        if marker and extra is None:
            # For another Python or system, as far as we can tell.
            continue
        there = found.get(name)
        wanted = f"{name}{bounds}"
        if there is None:
            yield f"{wanted}: pip install '{wanted}'", extra[1] if extra else None
        elif not _fits(there.version, bounds):
            told = f"{wanted}, found {there.version}: pip install '{wanted}'"
            yield told, extra[1] if extra else None


def _fits(version: str, bounds: str) -> bool:
    """Return whether a version keeps its ``>=`` and ``<``; others are pip's to judge."""
    here = _numbers(version)
    return all(
        (here >= _numbers(bound)) if kind == ">=" else (here < _numbers(bound))
        for kind, bound in _BOUND.findall(bounds)
    )


def _numbers(version: str) -> tuple[int, ...]:
    released = re.match(r"[0-9.]+", version)
    numbers = [int(part) for part in (released[0] if released else "0").split(".") if part]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _runtime(found: Mapping[str, Distribution], failure: Failure | None) -> str:
    if _RUNTIME not in found:
        return (
            "official runtime: not installed, so that files run in lowerdeck-runner alone, which "
            "emulates it: pip install executorch"
        )
    version = found[_RUNTIME].version
    if failure is not None:
        told = _told(failure, found)
        return f"official runtime: executorch {version}, INSTALLED BUT CANNOT BE LOADED: {told}"
    binding = (
        "with its Python binding" if official_binding_name() else "WITHOUT its Python binding"
    )
    needs = "" if "torch" in found else ", which needs torch: pip install torch"
    return f"official runtime: executorch {version}, {binding}{needs}"
