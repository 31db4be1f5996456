"""The chores know the workspace, and the record of releases agrees with the history."""

from __future__ import annotations

import itertools
import subprocess
import tomllib
from pathlib import Path

import pytest

from tools import workspace

ROOT = Path(__file__).resolve().parents[2]
# From this commit on, a line of releases.toml is never changed: someone may have built from it.
APPEND_ONLY_FROM = "d81db26"


def test_packages_are_the_folders_and_lowest_layers_come_first():
    folders = {path.name for path in (ROOT / "packages").iterdir() if path.is_dir()}
    assert set(workspace.PACKAGES) == folders
    seen: set[str] = set()
    for package in workspace.PACKAGES:
        assert workspace.siblings(package) <= seen, f"{package} stands before what it needs"
        seen.add(package)


def test_the_demos_need_every_package_below_but_what_gives_modules_back():
    beside = {"demo-backends", "exir-compat", "language-models", "openvino"}
    assert workspace.siblings("demo-backends") == set(workspace.PACKAGES) - beside - {"unflatten"}


def test_an_unknown_release_has_no_commit():
    assert workspace.released_commit("serializer", "99.0.0") is None


def test_each_release_is_a_commit_of_this_history_with_that_version():
    for package, known in workspace.releases().items():
        assert package in workspace.PACKAGES
        for version, commit in known.items():
            if not workspace.is_known(commit):
                pytest.skip(f"{package} {version} is {commit}, which this clone lacks")
            text = workspace.git("show", f"{commit}:packages/{package}/pyproject.toml")
            assert f'version = "{version}"' in text
            workspace.git("merge-base", "--is-ancestor", commit, "HEAD")
            assert workspace.tagged_commit(package, version) in {None, commit}


def test_users_can_ask_for_every_set_of_packages_that_lacks_no_dependency():
    closed = {
        frozenset(chosen)
        for size in range(1, len(workspace.PACKAGES) + 1)
        for chosen in itertools.combinations(workspace.PACKAGES, size)
        if all(workspace.siblings(package) <= set(chosen) for package in chosen)
    }
    asked = workspace.wishes()
    assert {brought for _, brought in asked} == closed
    plain = [wish for wish, _ in asked if "[" not in "".join(wish)]
    assert len(plain) == len(closed)


def test_an_extra_brings_what_it_declares():
    (brought,) = (b for wish, b in workspace.wishes() if wish == ("lowered-module[run]",))
    assert brought == workspace.siblings("lowered-module") | {"lowered-module", "runner"}


def test_no_release_that_was_recorded_is_changed_or_lost():
    try:
        shallow = workspace.git("rev-parse", "--is-shallow-repository") == "true"
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("there is no git history here")
    if shallow:
        pytest.skip("this clone is shallow: fetch all history")
    # Before, the record was written anew with the history that it names.
    span = ("--full-history", f"{APPEND_ONLY_FROM}..HEAD", "--", "releases.toml")
    commits = [APPEND_ONLY_FROM, *workspace.git("log", "--format=%H", *span).split()]
    for commit in commits:
        earlier = tomllib.loads(workspace.git("show", f"{commit}:releases.toml"))
        assert _lost(earlier, workspace.releases()) == [], f"{commit} recorded otherwise"


def _lost(earlier: dict[str, dict[str, str]], later: dict[str, dict[str, str]]) -> list[str]:
    return [
        f"{package} {version} = {commit}, now {later.get(package, {}).get(version)}"
        for package, known in earlier.items()
        for version, commit in known.items()
        if later.get(package, {}).get(version) != commit
    ]


def test_a_record_may_only_grow():
    record = {"serializer": {"0.1.0": "aa"}}
    assert _lost(record, {"serializer": {"0.1.0": "aa", "0.1.1": "bb"}, "emitter": {}}) == []
    assert _lost(record, {"serializer": {"0.1.0": "bb"}}) == ["serializer 0.1.0 = aa, now bb"]
    assert _lost(record, {"serializer": {"0.1.1": "aa"}}) == ["serializer 0.1.0 = aa, now None"]
    assert _lost(record, {}) == ["serializer 0.1.0 = aa, now None"]
