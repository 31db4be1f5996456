"""The chores know the workspace, and the record of releases agrees with the history."""

from __future__ import annotations

from pathlib import Path

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
        for version, commit in known.items():
            text = workspace.git("show", f"{commit}:packages/{package}/pyproject.toml")
            assert f'version = "{version}"' in text
            workspace.git("merge-base", "--is-ancestor", commit, "HEAD")
