"""The list of packages, the record of releases, and the lowest siblings that a package admits."""

from __future__ import annotations

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


def test_the_oldest_siblings_are_those_that_all_lower_bounds_admit(tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "ROOT", tmp_path)
    needs = {
        "serializer": [],
        "emitter": ["lowerdeck-serializer>=0.2.1,<0.3"],
        "runner": ["lowerdeck-serializer>=0.2.0,<0.3", "lowerdeck-emitter>=0.1.0,<0.2"],
    }
    for package, dependencies in needs.items():
        folder = tmp_path / "packages" / package
        folder.mkdir(parents=True)
        table = f'[project]\nversion = "0.1.0"\ndependencies = {dependencies}\n'
        (folder / "pyproject.toml").write_text(table)
    assert workspace.oldest_siblings("serializer") == {}
    assert workspace.oldest_siblings("runner") == {"serializer": "0.2.1", "emitter": "0.1.0"}
