"""What editors and hooks are told agrees with the files and with the menu of sessions."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {".css", ".fbs", ".js", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}


def _tracked_texts() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [ROOT / name for name in listed if Path(name).suffix in TEXTS]


def _sessions() -> dict[str, str]:
    """Return each session's name and the first line of its docstring."""
    found = {}
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            named = re.search(r'@nox\.session\(.*?name="([^"]+)"', _decorators(node))
            summary = (ast.get_docstring(node) or "").splitlines()[:1]
            found[named[1] if named else node.name] = "".join(summary)
    return found


def _decorators(node: ast.FunctionDef) -> str:
    return "\n".join(f"@{ast.unparse(one)}" for one in node.decorator_list).replace("'", '"')


def test_files_are_what_editorconfig_asks_of_editors():
    for path in _tracked_texts():
        if not path.exists():
            continue
        data = path.read_bytes()
        assert b"\r" not in data, path
        assert not data or data.endswith(b"\n"), path
        if path.suffix != ".md":
            assert not re.search(rb"[ \t]+$", data, re.MULTILINE), path


def test_the_menu_tells_every_session_from_the_others():
    summaries = _sessions()
    assert all(summary.endswith((".", "``).")) for summary in summaries.values()), summaries
    assert len(set(summaries.values())) == len(summaries)
    assert all(len(f"* {name} -> {text}") <= 110 for name, text in summaries.items())


def test_contributors_are_told_of_sessions_that_exist():
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    table = re.findall(r"^\| (.*?) \|", guide, re.MULTILINE)
    named = {name for row in table for name in re.findall(r"`([a-z][a-z0-9.-]*)", row)}
    ran: set[str] = set()
    for line in re.findall(r"nox -s ([a-z0-9. -]+)", guide):
        ran |= set(line.split(" -- ")[0].split())
    assert named | ran <= set(_sessions()), (named | ran) - set(_sessions())
    missing = set(_sessions()) - named - {"torch", "build", "lint", "types", "layers"}
    assert not missing, f"the table does not say what these are for: {missing}"


def test_weights_are_looked_at_without_being_copied():
    # torch makes a lazy copy a true one for whoever might write: ``data_address`` and ``bytes_of``
    # of torch-base only read.
    small = {
        ("openvino", "norms.py"),  # a tensor made there
        ("openvino", "translation.py"),  # a buffer from ``bytes_of``
        ("openvino", "runtime.py"),  # what a run is given
    }
    found = set()
    for package in (ROOT / "packages").iterdir():
        for path in (package / "src").rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and node.attr in {"data_ptr", "numpy"}:
                    found.add((package.name, path.name, node.lineno))
    strangers = {place for place in found if place[:2] not in small}
    assert not strangers, strangers


def test_hooks_need_no_repository_but_this_one():
    repos = re.findall(r"^\s*- repo: (\S+)", (ROOT / ".pre-commit-config.yaml").read_text(), re.M)
    assert set(repos) == {"local"}


def test_the_areas_of_code_mutants_are_where_they_say():
    areas = tomllib.loads((ROOT / "tools/code_mutants/areas.toml").read_text())
    for area in areas.values():
        for name in (*area["sources"], *area["tests"]):
            assert (ROOT / name).exists(), name
