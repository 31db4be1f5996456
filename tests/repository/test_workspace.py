"""The chores know the workspace, and the record of releases agrees with the history."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tools import workspace

ROOT = Path(__file__).resolve().parents[2]


def test_packages_are_the_folders_and_lowest_layers_come_first():
    folders = {path.name for path in (ROOT / "packages").iterdir() if path.is_dir()}
    assert set(workspace.PACKAGES) == folders
    seen: set[str] = set()
    for package in workspace.PACKAGES:
        assert workspace.siblings(package) <= seen, f"{package} stands before what it needs"
        seen.add(package)


def test_the_top_package_needs_every_other_but_unflatten():
    assert workspace.siblings("demo-backends") == set(workspace.PACKAGES) - {
        "demo-backends",
        "unflatten",
    }


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
