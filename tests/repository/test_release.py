"""What ``nox -s release`` must find, tried in repositories made for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import release, workspace

PACKAGE = "serializer"
DOOR = '''"""A front door."""

from lowerdeck.serializer.files import load, save

__all__ = ["load", "save"]
'''
FILES = '''"""Files."""


def load(path: str, *, limit: int = 1) -> bytes:
    """Return what the file holds."""
    return b""


def save(path: str) -> None:
    """Write a file."""


def inner() -> None:
    """Not shown at the front door."""
'''
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2026-11-20\n\n### Added\n\n- All.\n"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Make a repository with one package at 0.1.0, whose changelog is dated."""
    monkeypatch.setattr(workspace, "ROOT", tmp_path)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    workspace.git("init", "-q")
    workspace.git("config", "user.name", "someone")
    workspace.git("config", "user.email", "someone@example.org")
    _set_version(tmp_path, "0.1.0")
    _write(tmp_path, "CHANGELOG.md", CHANGELOG)
    _write(tmp_path, "src/lowerdeck/serializer/__init__.py", DOOR)
    _write(tmp_path, "src/lowerdeck/serializer/files.py", FILES)
    _commit()
    return tmp_path


def _write(root: Path, name: str, text: str) -> None:
    path = root / "packages" / PACKAGE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _set_version(root: Path, version: str, dependencies: str = "[]") -> None:
    project = f'[project]\nversion = "{version}"\ndependencies = {dependencies}\n'
    _write(root, "pyproject.toml", project)


def _commit() -> str:
    workspace.git("add", "-A")
    workspace.git("commit", "-q", "-m", "a state")
    return workspace.git("rev-parse", "HEAD")


def _record(root: Path, version: str, commit: str) -> None:
    (root / "releases.toml").write_text(f'[{PACKAGE}]\n"{version}" = "{commit}"\n')
    _commit()


def test_a_dated_clean_package_is_ready(repository):
    assert release.record_problems(PACKAGE, "0.1.0") == []
    assert release.changelog_problems(PACKAGE, "0.1.0") == []
    assert release.pin_problems(PACKAGE) == []
    assert release.api_problems(PACKAGE, "0.1.0") == []


def test_a_dirty_tree_is_found(repository, monkeypatch):
    monkeypatch.setattr(release, "build_problems", lambda package: [])
    assert release.problems_of(PACKAGE) == []
    (repository / "stray.txt").write_text("stray")
    (problem,) = release.problems_of(PACKAGE)
    assert "not clean" in problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CHANGELOG.replace("2026-11-20", "soon"), "no heading"),
        (CHANGELOG.replace("[Unreleased]\n", "[Unreleased]\n\n- More.\n"), "[Unreleased]"),
    ],
)
def test_a_changelog_that_is_not_finished_is_found(repository, text, words):
    _write(repository, "CHANGELOG.md", text)
    (problem,) = release.changelog_problems(PACKAGE, "0.1.0")
    assert words in problem


def test_a_sibling_must_be_released_and_pinned_by_a_range(repository):
    _set_version(repository, "0.1.0", '["lowerdeck-graph-fuser>=0.1.0,<0.2"]')
    (problem,) = release.pin_problems(PACKAGE)
    assert "graph-fuser 0.1.0, which is not released" in problem
    _set_version(repository, "0.1.0", '["lowerdeck-graph-fuser==0.1.0"]')
    (problem,) = release.pin_problems(PACKAGE)
    assert "write every sibling as" in problem


def test_a_sibling_that_is_released_together_counts_with_its_version(repository):
    _set_version(repository, "0.1.0", '["lowerdeck-graph-fuser>=0.2.0,<0.3"]')
    sibling = repository / "packages/graph-fuser/pyproject.toml"
    sibling.parent.mkdir()
    for version, is_ready in (("0.2.0", True), ("0.2.1", False)):
        sibling.write_text(f'[project]\nversion = "{version}"\ndependencies = []\n')
        assert (release.pin_problems(PACKAGE, [PACKAGE, "graph-fuser"]) == []) is is_ready
        assert release.pin_problems(PACKAGE, [PACKAGE])


def test_the_recorded_state_stays_ready_and_a_change_asks_for_a_version(repository):
    _record(repository, "0.1.0", workspace.git("rev-parse", "HEAD"))
    assert release.record_problems(PACKAGE, "0.1.0") == []
    _write(repository, "src/lowerdeck/serializer/files.py", FILES + "\n")
    _commit()
    (problem,) = release.record_problems(PACKAGE, "0.1.0")
    assert "changed since 0.1.0" in problem
    assert release.record_problems(PACKAGE, "0.1.1") == []
    (problem,) = release.record_problems(PACKAGE, "0.0.9")
    assert "does not come after 0.1.0" in problem


def test_a_tag_must_be_recorded_and_point_at_the_recorded_commit(repository):
    first = workspace.git("rev-parse", "HEAD")
    workspace.git("tag", "-a", f"{PACKAGE}-v0.1.0", "-m", "annotated")
    (problem,) = release.record_problems(PACKAGE, "0.1.0")
    assert "delete the tag" in problem
    _record(repository, "0.1.0", first)
    assert release.record_problems(PACKAGE, "0.1.0") == []
    workspace.git("tag", "-f", f"{PACKAGE}-v0.1.0", "HEAD")
    (problem,) = release.record_problems(PACKAGE, "0.1.0")
    assert f"releases.toml records {first}" in problem


def test_a_removed_public_name_needs_a_new_minor_version(repository):
    _record(repository, "0.1.0", workspace.git("rev-parse", "HEAD"))
    _write(repository, "src/lowerdeck/serializer/files.py", FILES.replace("def save", "def put"))
    door = DOOR.replace("load, save", "load").replace(', "save"', "")
    _write(repository, "src/lowerdeck/serializer/__init__.py", door)
    (problem,) = release.api_problems(PACKAGE, "0.1.1")
    assert problem.startswith("breaks 0.1.0 without a new minor version")
    assert "`save`" in problem
    assert release.api_problems(PACKAGE, "0.2.0") == []
