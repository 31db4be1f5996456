"""What the workspace holds: its packages, what each declares, and which commit each release is."""

from __future__ import annotations

import io
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
    "inspect",
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
TORCH_FREE = frozenset({"inspect", "serializer"})
# Packages that the tests of a package need beside those that it declares.
TEST_NEEDS = {"demo-backends": ("xnnpack",), "emitter": ("inspect", "runner")}

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


def pins_of(table: dict[str, Any]) -> dict[str, str]:
    """Return the lower bound of each sibling in a ``[project]`` table's dependencies."""
    matches = (_PIN.match(requirement) for requirement in table["dependencies"])
    return {match[1]: match[2] for match in matches if match}


def sibling_pins(package: str) -> dict[str, str]:
    """Return the lower bound of each sibling that a package declares itself."""
    return pins_of(project(package))


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
    """Write ``path`` as it was at ``commit`` below ``folder``; return its path.

    An archive leaves nothing behind in the repository, unlike a worktree, and holds no file that
    git does not know.
    """
    command = ["git", "archive", commit, "--", path]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder / path


def oldest_siblings(package: str) -> dict[str, str]:
    """Return the lowest version of each sibling that a package, and these siblings, admit."""
    oldest: dict[str, str] = {}
    pending = [project(package)]
    while pending:
        for sibling, version in pins_of(pending.pop()).items():
            if newest((version, oldest.get(sibling, "0.0.0"))) != oldest.get(sibling):
                oldest[sibling] = version
                pending.append(_project_of(sibling, version))
    return oldest


def _project_of(package: str, version: str) -> dict[str, Any]:
    table, commit = project(package), released_commit(package, version)
    if table["version"] != version and commit is not None and is_known(commit):
        table = project_at(commit, package)
    return table
