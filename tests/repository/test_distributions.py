"""What a stranger sees of each package on an index, and what its code needs to be installed."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import workspace

ROOT = Path(__file__).resolve().parents[2]

# Distributions whose import name is another.
IMPORTED_AS = {
    f"lowerdeck-{package}": f"lowerdeck.{workspace.import_name(package)}"
    for package in workspace.PACKAGES
}
# Who asks for what a package offers by an entry point: without it the offer is of no use.
ASKED_BY = {
    "lowerdeck.commands": "lowerdeck-inspect",
    "lowerdeck.backends": "lowerdeck-lowered-module",
    "lowerdeck.partitioners": "lowerdeck-lowered-module",
    "lowerdeck.quantizations": "lowerdeck-lowered-module",
    "lowerdeck.runtimes": "lowerdeck-runner",
    "lowerdeck.payloads": "lowerdeck-inspect",
}
# Type checkers bring it along; nothing imports it when code runs.
ONLY_FOR_TYPES = {"_typeshed"}
# What tests ask for by find_spec, and go another way without it.
WHERE_TESTED = {"lowered-module": {"lowerdeck-runner"}}
# What is taken where it is there: 600 MB of distributions are nothing to ask of those who export.
WHERE_INSTALLED = {
    # torch comes with executorch, into whose process it must be loaded first; so may openvino.
    "inspect": {"executorch"},
    "runner": {"executorch", "openvino"},
}


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return match[0]


def _declared(table: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Return what is required, and what is required or belongs to an extra."""
    required = {_name(r) for r in table["dependencies"]}
    extras = table.get("optional-dependencies", {}).values()
    return required, required.union(*({_name(r) for r in extra} for extra in extras))


def _modules(tree: ast.AST) -> Iterator[str]:
    """Yield the name of each module that a source imports, also by ``import_module("...")``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            text = node.args[0] if node.args else None
            if called in {"import_module", "find_spec"} and isinstance(text, ast.Constant):
                yield str(text.value)


def _distributions(source: str) -> set[str]:
    """Return the distributions of others that a source needs, by the names of its imports."""
    by_import = {name: distribution for distribution, name in IMPORTED_AS.items()}
    found = set()
    for module in _modules(ast.parse(source)):
        parts = module.split(".")
        top = ".".join(parts[:2]) if parts[0] == workspace.BRAND else parts[0]
        if top not in sys.stdlib_module_names | ONLY_FOR_TYPES:
            found.add(by_import.get(top, top))
    return found


def _imported(package: str, folder: str = "src") -> set[str]:
    sources = (ROOT / "packages" / package / folder).rglob("*.py")
    found = set().union(*(_distributions(path.read_text()) for path in sources))
    return found - {f"lowerdeck-{package}"}


@pytest.mark.parametrize("package", workspace.PACKAGES)
def test_every_import_is_declared(package):
    _, allowed = _declared(workspace.project(package))
    allowed = allowed | WHERE_INSTALLED.get(package, set())
    assert _imported(package) <= allowed, "declare it: a dependency's dependency may go"


@pytest.mark.parametrize("package", workspace.PACKAGES)
def test_tests_of_a_package_need_no_package_that_is_not_installed_with_it(package):
    installed = workspace.siblings(package).union(workspace.TEST_NEEDS.get(package, ()))
    there = {f"lowerdeck-{sibling}" for sibling in installed}
    ours = _imported(package, "tests") & IMPORTED_AS.keys()
    assert ours <= there | WHERE_TESTED.get(package, set()), "move the test to tests/interop"


@pytest.mark.parametrize("package", workspace.PACKAGES)
def test_every_dependency_is_imported_or_asks_for_an_entry_point(package):
    table = workspace.project(package)
    required, _ = _declared(table)
    offered = {ASKED_BY[group] for group in table.get("entry-points", {}) if group in ASKED_BY}
    assert required <= _imported(package) | offered


@pytest.mark.parametrize("package", workspace.PACKAGES)
def test_an_index_can_tell_whose_a_package_is_and_where_it_runs(package):
    table = workspace.project(package)
    assert table["authors"] == [{"name": "Lowerdeck developers"}]
    assert len(table["keywords"]) >= 3
    assert table["license"] == "BSD-3-Clause"
    topics = {text.split(" :: ")[0] for text in table["classifiers"]}
    assert topics >= {"Development Status", "Intended Audience", "Topic", "Typing"}
    # The licence stands in `license`; a classifier beside it is an error on indexes (PEP 639).
    assert "License" not in topics
    assert table.get("urls", {}) == workspace.project_urls()
