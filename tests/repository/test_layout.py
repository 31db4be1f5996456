"""Packages, folders and modules: names, sizes, and the door through which each is entered."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())
SOURCES = sorted((ROOT / "packages").glob("*/src/**/*.py"))


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def _public_definitions(
    tree: ast.Module,
) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [n for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]
    for node in list(found):
        if isinstance(node, ast.ClassDef):
            found += [n for n in node.body if isinstance(n, kinds) and not n.name.startswith("_")]
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_stands_alone(package):
    folder = ROOT / "packages" / package
    for name in ("README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"):
        assert (folder / name).is_file(), name
    # An index shows the page by itself: a relative link leads nowhere there.
    links = re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text())
    assert all(link.startswith(("https://", "#")) for link in links)
    # A link would break the wheel that is built from the sdist.
    assert not (folder / "LICENSE").is_symlink()
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert not (folder / "src/lowerdeck/__init__.py").exists(), "lowerdeck is a PEP 420 namespace"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        if requirement.startswith("lowerdeck-"):
            assert re.fullmatch(r"lowerdeck-[a-z-]+>=0\.\d+\.\d+,<0\.\d+", requirement)


def _module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts[parts.index("lowerdeck") :]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_a_folder_with_a_front_door_is_entered_through_it():
    """A folder that lists names in its __init__ is entered there; see layers.md for the others."""
    doors = {
        _module_of(path)
        for path in SOURCES
        if path.name == "__init__.py" and "__all__ = " in path.read_text()
    }
    past = []
    for path in SOURCES:
        module = _module_of(path)
        for node in ast.walk(ast.parse(path.read_text())):
            # A function that imports what it needs late may go past a door that would load more.
            if not isinstance(node, ast.ImportFrom) or node.module is None or node.col_offset:
                continue
            parts = node.module.split(".")
            above = [".".join(parts[:k]) for k in range(1, len(parts))]
            past += [
                f"{module} imports {node.module} past {door}"
                for door in above
                if door in doors and not f"{module}.".startswith(f"{door}.")
            ]
    assert not past, "\n".join(past)


def _offered(door: Path) -> set[str] | None:
    """Return the names in ``__all__`` of a package or folder, None where it has no such list."""
    for node in ast.parse((door / "__init__.py").read_text()).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node.value, ast.List | ast.Tuple), door
            return {entry.value for entry in node.value.elts if isinstance(entry, ast.Constant)}
    return None


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_has_a_front_door(package):
    door = ROOT / "packages" / package / "src/lowerdeck" / package.replace("-", "_")
    assert ast.get_docstring(ast.parse((door / "__init__.py").read_text()))
    assert _offered(door)


@pytest.mark.parametrize(
    "door",
    sorted({path.parent for path in SOURCES if path.name == "__init__.py"}),
    ids=lambda p: str(p).rpartition("/lowerdeck/")[2],
)
def test_no_name_of_a_door_is_a_module_behind_it_too(door):
    modules = {path.stem for path in door.iterdir()}
    both = (_offered(door) or set()) & modules
    assert not both, "such a name is ambiguous to import: which of the two depends on the order"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "packages")))
def test_modules_hold_one_idea_and_say_what_it_is(path):
    if path.name == "__init__.py" and not path.read_text().strip():
        return
    assert _lines(path) <= 600, "split it: a module holds one idea"
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module's first line says what it is for"
    bare = [n.name for n in _public_definitions(tree) if ast.get_docstring(n) is None]
    if not path.name.startswith("_"):
        assert not bare, f"public names without a docstring: {bare}"
    assert path.stem not in {"utils", "common", "core", "helpers"}


def test_ci_runs_the_readme_test_command_and_nothing_else():
    script = (ROOT / ".ci/run").read_text()
    command = script.strip().splitlines()[-1]
    readme = (ROOT / "README.md").read_text()
    assert command in readme
    ran = [
        line
        for line in script.splitlines()
        if line and not line.startswith(("#", "set ", "cd ", "log=", "trap ")) and line != command
    ]
    assert ran == []


def test_no_committed_file_names_a_path_of_one_machine():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    places = re.compile("/" + "work/|/" + "root/|/" + "opt/(venvs|wheels|pypi)")
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ".yml", ".html", ".fbs", ".json"}:
            assert not places.search(path.read_text(errors="replace")), name
