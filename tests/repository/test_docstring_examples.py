"""The examples in docstrings run, with the public names of their package."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from tools.workspace import PACKAGES, import_name


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_run(package: str) -> None:
    top = importlib.import_module(f"lowerdeck.{import_name(package)}")
    public = {name: getattr(top, name) for name in top.__all__}
    runner = doctest.DocTestRunner()
    for found in pkgutil.walk_packages(top.__path__, f"{top.__name__}."):
        module = importlib.import_module(found.name)
        for test in doctest.DocTestFinder().find(module, globs=public | vars(module)):
            runner.run(test)
    assert runner.failures == 0
