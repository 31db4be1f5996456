"""Say what still stands between a package and its tag. Run as ``nox -s release -- PACKAGE``."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.public_api import breaks
from tools.workspace import (
    BRAND,
    PACKAGES,
    ROOT,
    extract,
    git,
    import_name,
    is_known,
    newest,
    project,
    released_commit,
    releases,
    sibling_pins,
    siblings,
    tagged_commit,
    version_numbers,
)

DIST = ROOT / "dist"


def problems_of(package: str, together: Sequence[str] = ()) -> list[str]:
    """Return what keeps ``package`` from being released, each in a line; see `pin_problems`."""
    version = str(project(package)["version"])
    problems = []
    if git("status", "--porcelain"):
        problems.append("the working tree is not clean: commit or remove what git status lists")
    problems += record_problems(package, version)
    problems += changelog_problems(package, version)
    problems += pin_problems(package, together)
    problems += api_problems(package, version)
    problems += build_problems(package)
    return problems


def main(*packages: str) -> None:
    """Print what is left to do, or what to do next when nothing is left.

    Raises:
        SystemExit: Something is left to do; the message lists it.
    """
    if not packages or not set(packages) <= set(PACKAGES):
        sys.exit(f"name what to release, of: {', '.join(PACKAGES)}; found: {' '.join(packages)}")
    problems = [
        f"- {package}: {line}" for package in packages for line in problems_of(package, packages)
    ]
    if problems:
        sys.exit("\n".join(problems))
    for package in packages:
        print("\n".join(_next_steps(package, str(project(package)["version"]))))


def record_problems(package: str, version: str) -> list[str]:
    """Compare the version with the record of releases, and the tag with both."""
    known = releases().get(package, {})
    tag, tagged = f"{package}-v{version}", tagged_commit(package, version)
    commit = known.get(version)
    if commit is None:
        problems = []
        if tagged is not None:
            problems.append(
                f"tag {tag} exists, but releases.toml does not know it: delete the tag"
            )
        if known and version_numbers(version) <= version_numbers(last := newest(known)):
            problems.append(f"{version} does not come after {last}: run `hatch version minor`")
        return problems
    if not is_known(commit):
        return [f"{version} is recorded at {commit}, which this clone lacks: fetch all history"]
    problems = []
    if git("diff", "--name-only", commit, "HEAD", "--", f"packages/{package}"):
        problems.append(f"changed since {version} was recorded: run `hatch version minor`")
    if tagged not in {None, commit}:
        problems.append(f"tag {tag} points at {tagged}, but releases.toml records {commit}")
    return problems


def changelog_problems(package: str, version: str) -> list[str]:
    """The version's heading must be dated, and nothing may still stand under Unreleased."""
    text = (ROOT / "packages" / package / "CHANGELOG.md").read_text()
    problems = []
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE):
        problems.append(f"CHANGELOG.md has no heading `## [{version}] - YYYY-MM-DD`")
    unreleased = re.search(r"^## \[Unreleased\]$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if unreleased and unreleased[1].strip():
        problems.append("CHANGELOG.md lists changes under [Unreleased]: move them to the version")
    return problems


def pin_problems(package: str, together: Sequence[str] = ()) -> list[str]:
    """Every sibling must be pinned `>=X.Y.Z,<X.(Y+1)`, from a version that is released.

    Those of ``together`` count with the version that they have here: they are released with it.
    """
    declared = [r for r in project(package)["dependencies"] if r.startswith(f"{BRAND}-")]
    pins = sibling_pins(package)
    problems = []
    if len(declared) != len(pins):
        problems.append(f"write every sibling as >=X.Y.Z,<X.(Y+1); found {declared}")
    for sibling, version in pins.items():
        is_with_it = sibling in together and version == project(sibling)["version"]
        if not is_with_it and released_commit(sibling, version) is None:
            problems.append(f"needs {sibling} {version}, which is not released: release it first")
    return problems


def build_problems(package: str) -> list[str]:
    """Build from the commit alone, elsewhere: both must give the files that lie in ``dist/``."""
    with tempfile.TemporaryDirectory() as folder:
        source = extract("HEAD", f"packages/{package}", Path(folder))
        # hatchling copies the ignore file that it finds above the package.
        extract("HEAD", ".gitignore", Path(folder))
        again = Path(folder) / "dist"
        command = [sys.executable, "-m", "build", "--no-isolation", "-o", str(again), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        expected = _digests(again, package)
    found = _digests(DIST, package)
    return [
        f"{name} in dist/ is not what the commit builds: run `nox -s build` and compare"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]


def api_problems(package: str, version: str) -> list[str]:
    """Compare the public names with the newest release; a break needs a new minor version."""
    known = releases().get(package, {})
    if not known:
        return []
    last = newest(known)
    if may_break(last, version) or not is_known(known[last]):
        return []
    module, source = f"{BRAND}.{import_name(package)}", f"packages/{package}/src"
    with tempfile.TemporaryDirectory() as folder:
        old = extract(known[last], source, Path(folder))
        below = {
            f"{BRAND}.{import_name(sibling)}": ROOT / f"packages/{sibling}/src"
            for sibling in siblings(package)
        }
        found = breaks(module, old, ROOT / source, below)
    return [f"breaks {last} without a new minor version: {explanation}" for explanation in found]


def may_break(old: str, new: str) -> bool:
    """Return whether ``new`` may break ``old`` by semantic versions; before 1.0, a minor may."""
    (old_major, old_minor, _), (new_major, new_minor, _) = (
        version_numbers(old),
        version_numbers(new),
    )
    return new_major > old_major or (old_major == 0 == new_major and new_minor > old_minor)


def _digests(folder: Path, package: str) -> dict[str, str]:
    files = folder.glob(f"{BRAND}_{import_name(package)}-*")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _next_steps(package: str, version: str) -> list[str]:
    commit = released_commit(package, version)
    lines = [f"{package} {version} is ready, if the tests that follow pass."]
    if commit is None:
        commit = git("rev-parse", "HEAD")
        lines += [
            "Record it in releases.toml:",
            "",
            f"    [{package}]",
            f'    "{version}" = "{commit}"',
            "",
        ]
    if tagged_commit(package, version) is None:
        lines += [
            "Tag it:",
            "",
            f"    git tag -a {package}-v{version} {commit} -m '{BRAND}-{package} {version}'",
            "",
        ]
    return [
        *lines,
        "Upload from dist/:",
        *(f"    {digest}  {name}" for name, digest in sorted(_digests(DIST, package).items())),
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
