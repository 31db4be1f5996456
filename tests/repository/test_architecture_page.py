"""The page on the architecture tells what the code does: where programs pass, who imports whom."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
MODULE = re.compile(r"`([a-z_]+/[a-z_/]+\.py)`")
HEADINGS = {
    "file": "### An ExportedProgram to a file",
    "submodules": "### A node list to submodules",
    "numbers": "### A file to numbers",
    "modules": "### An ExportedProgram to an unflattened module",
}


@pytest.fixture(scope="module")
def journeys() -> dict[str, list[str]]:
    """Return the modules of each journey, from a process in which nothing is cached yet."""
    run = [sys.executable, "-m", "tools.journeys"]
    printed = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    parts = (part.splitlines() for part in printed.split("# ")[1:])
    return {
        name: [line.split()[0] for line in lines if not line.startswith("short:")]
        for name, *lines in parts
    }


def test_every_module_that_the_page_names_exists():
    for name in MODULE.findall(PAGE):
        package = name.split("/")[0].replace("_", "-")
        assert (ROOT / "packages" / package / "src/lowerdeck" / name).is_file(), name


@pytest.mark.parametrize("journey", HEADINGS)
def test_the_page_names_the_modules_of_a_journey_in_the_order_of_a_run(journey, journeys):
    _, _, rest = PAGE.partition(HEADINGS[journey] + "\n")
    told = MODULE.findall(rest.partition("\n### ")[0])
    assert journeys[journey], "nothing was recorded"
    assert told == journeys[journey]


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
