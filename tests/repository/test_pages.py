"""What the pages tell of modules is so: where programs pass, who imports whom, what words mean."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.measures import parts

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
MEASURES = (ROOT / "docs/explanation/measures.md").read_text()
GLOSSARY = (ROOT / "docs/glossary.md").read_text()
MODULE = re.compile(r"`([a-z_]+/[a-z_/]+\.py)`")
HEADINGS = {
    "file": "### An ExportedProgram to a file",
    "submodules": "### A node list to submodules",
    "numbers": "### A file to numbers",
    "modules": "### An ExportedProgram to an unflattened module",
}


@pytest.fixture(scope="module")
def entries() -> dict[str, dict[str, int]]:
    """Return from how many modules each one of a journey is entered, with nothing cached yet."""
    run = [sys.executable, "-m", "tools.journeys"]
    printed = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    parts = (part.splitlines() for part in printed.split("# ")[1:])
    return {
        name: {
            line.split()[0]: int(line.split()[-1])
            for line in lines
            if not line.startswith("short:")
        }
        for name, *lines in parts
    }


def _source(module: str) -> Path:
    package = module.partition("/")[0].replace("_", "-")
    return ROOT / "packages" / package / "src/lowerdeck" / module


def test_every_module_that_the_page_names_exists():
    assert [name for name in MODULE.findall(PAGE) if not _source(name).is_file()] == []


def test_every_word_of_the_glossary_is_used_where_it_says():
    rows = re.findall(r"^\| ([^|]+?) \| [^|]+ \| `(\S+)` \|$", GLOSSARY, re.M)
    assert len(rows) == len(set(rows)) > 50
    assert len(rows) == len(MODULE.findall(GLOSSARY))
    for words, module in rows:
        source = module + _source(module).read_text().lower()
        word = re.sub(r" \(.*\)", "", words).split(", ")[0]
        # Sources bend words: to carry, carried; to legalize.
        assert all(part.removesuffix("ied") in source for part in word.split()), (words, module)


@pytest.mark.parametrize("journey", HEADINGS)
def test_the_page_names_the_modules_of_a_journey_and_no_others(journey, entries):
    _, _, rest = PAGE.partition(HEADINGS[journey] + "\n")
    told = MODULE.findall(rest.partition("\n### ")[0])
    assert entries[journey], "nothing was recorded"
    assert len(told) == len(set(told))
    assert set(told) - set(entries[journey]) == set(), "named, but not entered"
    assert set(entries[journey]) - set(told) == set(), "entered, but not named"


def test_a_reason_is_given_for_what_is_entered_from_several_modules(entries):
    rows = re.findall(r"^\| ([\w, ]+) \| (`.+?`) \| .{30,} \|$", MEASURES, re.M)
    given = {
        (journey, module)
        for journeys, named in rows
        for journey in journeys.split(", ")
        for module in MODULE.findall(named)
    }
    often = {
        (journey, module)
        for journey, modules in entries.items()
        for module, callers in modules.items()
        if callers >= 2
    }
    assert often - given == set(), "entered from several modules, without a reason"
    assert given - often == set(), "a reason for what is entered from one alone"


def test_the_table_of_layers_is_what_the_packages_declare():
    for project in (ROOT / "packages").glob("*/pyproject.toml"):
        name = project.parent.name.replace("-", "_")
        declared = tomllib.loads(project.read_text())["project"]
        optional = declared.get("optional-dependencies", {}).values()
        needed = {
            re.split("[^a-z-]", requirement)[0].removeprefix("lowerdeck-").replace("-", "_")
            for requirement in itertools.chain(declared["dependencies"], *optional)
        }
        (row,) = re.findall(rf"^\| \d \| {name} \| (.*) \|$", PAGE, re.M)
        if needed:
            assert set(re.findall(r"[a-z_]+", row.replace("as an extra", ""))) == needed
        else:
            assert row == "nothing but the standard library"


def test_every_file_and_test_of_the_map_for_contributors_exists():
    guide = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to change what")[2]
    sections = re.findall(r"^### (\S+)\n(.*?)(?=^##)", guide, re.M | re.S)
    assert {package for package, _ in sections} == {
        path.name for path in (ROOT / "packages").iterdir()
    }
    for package, section in sections:
        rows = re.findall(r"^\| [^`|]+ \| `(\S+)` \| `(\S+)` \|$", section, re.M)
        assert 6 <= len(rows) == section.count("\n|") - 2, package
        for module, test in rows:
            assert _source(module).is_file(), module
            folder = ROOT if "/" in test else ROOT / "packages" / package / "tests"
            assert (folder / test).is_file(), test


def test_the_page_of_measures_names_modules_that_exist():
    page = (ROOT / "docs/explanation/measures.md").read_text()
    named = MODULE.findall(page)
    assert len(named) > 20
    assert [name for name in named if not _source(name).is_file()] == []


def test_measures_can_be_taken_again():
    run = [sys.executable, "-m", "tools.measures"]
    printed = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    page = (ROOT / "docs/explanation/measures.md").read_text()
    assert printed.splitlines()[0] in page
    rows = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines()[2:]]
    for row in rows:
        (told,) = re.findall(rf"^\| {re.escape(row[1])} \|.*\|$", page, re.M)
        _, name, files, _, code, *_ = (cell.strip() for cell in told.split("|"))
        found = f"{name}: {files} files and {code} lines are told, found {row[2]} and {row[4]}"
        # Each change moves the numbers: `python -m tools.measures --write` once they are far off.
        assert abs(int(files) - int(row[2])) <= 2 + int(row[2]) // 20, found
        assert abs(int(code) - int(row[4])) <= 50 + int(row[4]) // 20, found


def test_what_each_large_part_buys_is_told():
    page = (ROOT / "docs/explanation/measures.md").read_text()
    told = dict(re.findall(r"^\| `([a-z_/]+)` \| (\d+) \| [^|]{20,} \|$", page, re.M))
    found = parts(900)
    # Below a thousand a part may be told or not, so that a line more or less is no fault.
    assert {name for name, lines in found.items() if lines >= 1000} <= set(told) <= set(found)
    for name, lines in told.items():
        said = f"{name}: {lines} code lines are told, found {found[name]}"
        assert abs(int(lines) - found[name]) <= found[name] // 10, said
