"""Say what still stands between one package and its tag. Run as ``nox -s release -- PACKAGE``."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import griffe

from tools.workspace import (
    BRAND,
    PACKAGES,
    ROOT,
    git,
    import_name,
    project,
    released_commit,
    releases,
    sibling_pins,
)


def problems_of(package: str) -> list[str]:
    """Return everything that keeps ``package`` from being released, each in a line."""
    version = project(package)["version"]
    problems = []
    if git("status", "--porcelain"):
        problems.append("the working tree is not clean: commit or remove what git status lists")
    if version in releases().get(package, {}):
        problems.append(f"{version} is released already: run `hatch version minor` in its folder")
    if not _has_dated_heading(package, version):
        problems.append(f"CHANGELOG.md has no heading `## [{version}] - YYYY-MM-DD`")
    problems += _pin_problems(package)
    problems += _build_problems(package)
    problems += _api_problems(package, version)
    return problems


def main(package: str) -> None:
    """Print what is left to do, or what to do next when nothing is left.

    Raises:
        SystemExit: Something is left to do; the message lists it.
    """
    if package not in PACKAGES:
        sys.exit(f"no package {package!r}; there are: {', '.join(PACKAGES)}")
    problems = problems_of(package)
    if problems:
        sys.exit("\n".join(f"- {problem}" for problem in problems))
    version = project(package)["version"]
    print(
        f"{package} {version} is ready. Record it in releases.toml:\n\n"
        f'    [{package}]\n    "{version}" = "{git("rev-parse", "HEAD")}"\n\n'
        f"then tag it: git tag -a {package}-v{version} -m '{BRAND}-{package} {version}'"
    )


def _has_dated_heading(package: str, version: str) -> bool:
    text = (ROOT / "packages" / package / "CHANGELOG.md").read_text()
    return bool(re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", text, re.M))


def _pin_problems(package: str) -> list[str]:
    """Every sibling must be pinned `>=X.Y.Z,<X.(Y+1)`, from a version that is released."""
    declared = [r for r in project(package)["dependencies"] if r.startswith(f"{BRAND}-")]
    pins = sibling_pins(package)
    problems = []
    if len(declared) != len(pins):
        problems.append(f"write every sibling as >=X.Y.Z,<X.(Y+1); found {declared}")
    for sibling, version in pins.items():
        if released_commit(sibling, version) is None:
            problems.append(f"needs {sibling} {version}, which releases.toml does not know")
    return problems


def _build_problems(package: str) -> list[str]:
    """Build twice: a release that two people build must be the same bytes."""
    digests = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [
                    *(sys.executable, "-m", "build", "--no-isolation", "-o", folder),
                    str(ROOT / "packages" / package),
                ],
                check=True,
                capture_output=True,
                env={**os.environ, "SOURCE_DATE_EPOCH": "1767225600"},
            )
            files = sorted(Path(folder).iterdir())
            digests.append({f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files})
    different = [name for name in digests[0] if digests[0][name] != digests[1].get(name)]
    return [f"{name} is not built reproducibly" for name in different]


def _api_problems(package: str, version: str) -> list[str]:
    """Compare the public names with the newest release; a break needs a new minor version."""
    known = releases().get(package, {})
    if not known:
        return []
    last = max(known, key=lambda v: tuple(map(int, v.split("."))))
    if version.rsplit(".", 1)[0] != last.rsplit(".", 1)[0]:
        return []
    module = f"{BRAND}.{import_name(package)}"
    source = f"packages/{package}/src"
    old = griffe.load_git(module, ref=known[last], repo=ROOT, search_paths=[source])
    new = griffe.load(module, search_paths=[str(ROOT / source)])
    breaks = griffe.find_breaking_changes(old, new)
    return [f"breaks the API of {last} without a new minor version: {b.explain()}" for b in breaks]


if __name__ == "__main__":
    main(*sys.argv[1:])
