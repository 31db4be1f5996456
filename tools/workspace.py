"""What the workspace holds: its packages, what each declares, and which commit each release is."""

from __future__ import annotations

import io
import itertools
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BRAND = "lowerdeck"

# Lowest layer first, so that a list of them is an order to install in.
PACKAGES = (
    "torch-base",
    "decompose",
    "graph-fuser",
    "serializer",
    "emitter",
    "runner",
    "unflatten",
    "lowered-module",
    "xnnpack",
    "openvino",
    "exir-compat",
    "language-models",
    "demo-backends",
)
TORCH_FREE = frozenset({"serializer"})

# Where the public finds this repository: nowhere yet, and an address that does not answer is worse
# than none. Whoever publishes it writes it here; tests then ask for it in every pyproject.toml.
HOME_URL = ""

_PIN = re.compile(rf"{BRAND}-([a-z-]+)>=(\d+\.\d+\.\d+),<")


def import_name(package: str) -> str:
    """Return the folder name under ``lowerdeck`` that ``package`` installs."""
    return package.replace("-", "_")


def project(package: str) -> dict[str, Any]:
    """Return the ``[project]`` table of a package."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table


def umbrella() -> dict[str, Any]:
    """Return the ``[project]`` table of the distribution that only asks for the packages."""
    table: dict[str, Any] = tomllib.loads((ROOT / "umbrella/pyproject.toml").read_text())[
        "project"
    ]
    return table


def project_urls() -> dict[str, str]:
    """Return what every package must say in ``[project.urls]``."""
    return {"Source": HOME_URL} if HOME_URL else {}


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


def requirements_of(package: str) -> list[str]:
    """Return what a package and its extras declare beside its siblings."""
    table = project(package)
    declared: list[str] = [*table["dependencies"]]
    for extra in table.get("optional-dependencies", {}).values():
        declared += extra
    return [r for r in declared if not r.startswith(f"{BRAND}-")]


def wishes() -> list[tuple[tuple[str, ...], frozenset[str]]]:
    """Return every different thing that a user can ask pip for, with the packages it must bring.

    Each set of packages that lacks none of its dependencies is asked for by its tops (the members
    that no other member brings along), and each optional extra by its name.
    """
    found = []
    bring = {package: siblings(package) for package in PACKAGES}
    for size in range(1, len(PACKAGES) + 1):
        for chosen in itertools.combinations(PACKAGES, size):
            brought = set().union(*(bring[package] for package in chosen))
            # Asking for a package that another one brings is asking for the same set again.
            if not brought & set(chosen):
                found.append((chosen, brought | set(chosen)))
    for package in PACKAGES:
        for extra, requirements in project(package).get("optional-dependencies", {}).items():
            added = {m[1] for r in requirements if (m := _PIN.match(r))}
            wanted = {package, *siblings(package), *added}.union(*map(siblings, added))
            found.append(((f"{package}[{extra}]",), wanted))
    return [(asked, frozenset(wanted)) for asked, wanted in found]


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
    """Return the commit of a release, or None.

    Tags do not travel with every clone, the file does: it is the record, the tag a convenience.
    """
    return releases().get(package, {}).get(version)


def version_numbers(version: str) -> tuple[int, int, int]:
    """Return ``X.Y.Z`` as numbers, which sort as versions do."""
    major, minor, patch = (int(part) for part in version.split("."))
    return major, minor, patch


def newest(versions: Iterable[str]) -> str:
    """Return the last of some versions."""
    return max(versions, key=version_numbers)


def project_at(commit: str, package: str) -> dict[str, Any]:
    """Return the ``[project]`` table of a package as it was at ``commit``."""
    text = git("show", f"{commit}:packages/{package}/pyproject.toml")
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table


def is_known(commit: str) -> bool:
    """Return whether this clone holds ``commit`` (a shallow one may not)."""
    command = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == 0


def tagged_commit(package: str, version: str) -> str | None:
    """Return the commit that the tag of a release points at, or None where there is no tag."""
    tag = f"{package}-v{version}"
    return git("rev-list", "-n", "1", tag, "--") if git("tag", "--list", tag) else None


def restore_tag(package: str, version: str) -> None:
    """Make the tag of a recorded release where a clone lacks it."""
    commit = released_commit(package, version)
    if commit is not None and tagged_commit(package, version) is None:
        git("tag", f"{package}-v{version}", commit)


def extract(commit: str, path: str, folder: Path) -> Path:
    """Write ``path`` as it was at ``commit`` below ``folder``; return where it lies.

    An archive leaves nothing behind in the repository, unlike a worktree, and holds no file that
    git does not know.
    """
    command = ["git", "archive", commit, "--", path]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder / path
