"""``pip install lowerdeck`` asks for the packages, in versions that go together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import workspace

FOLDER = Path(__file__).resolve().parents[2] / "umbrella"
TABLE = workspace.umbrella()
EXTRAS: dict[str, list[str]] = TABLE["optional-dependencies"]
ASKED = [*TABLE["dependencies"], *(one for extra in EXTRAS.values() for one in extra)]


def _package(requirement: str) -> str:
    match = re.match(r"lowerdeck-([a-z-]+)", requirement)
    assert match, requirement
    return match[1]


def test_it_holds_no_code_and_asks_for_nothing_but_the_packages():
    files = sorted(path.name for path in FOLDER.iterdir())
    assert files == ["LICENSE", "README.md", "pyproject.toml"]
    assert {_package(one) for one in ASKED} == set(workspace.PACKAGES)


def test_what_needs_more_than_torch_is_an_extra():
    plain = {_package(one) for one in TABLE["dependencies"]}
    heavy = {"xnnpack", "openvino", "language-models", "exir-compat", "demo-backends"}
    assert plain == set(workspace.PACKAGES) - heavy


@pytest.mark.parametrize("requirement", ASKED)
def test_its_bounds_take_the_version_that_is_here_and_no_break(requirement):
    version = workspace.project(_package(requirement))["version"]
    major, minor, _ = workspace.version_numbers(version)
    assert requirement.endswith(f">={version},<{major}.{minor + 1}")
