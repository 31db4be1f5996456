"""Whoever calls torch's unflatten by keyword calls ours with the same words."""

from __future__ import annotations

import importlib
import inspect
from operator import attrgetter

import pytest

from lowerdeck import unflatten as package

# The module: torch.export itself has a function of that name.
theirs_module = importlib.import_module("torch.export.unflatten")

NAMES = (
    "unflatten",
    "FlatArgsAdapter.adapt",
    "FlatArgsAdapter.get_flat_arg_paths",
    "InterpreterModule.print_readable",
    "InterpreterModuleDispatcher.call_modules",
    "UnflattenedModule.print_readable",
)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_called_and_default_as_torchs(name: str) -> None:
    found = inspect.signature(attrgetter(name)(package)).parameters
    wanted = inspect.signature(attrgetter(name)(theirs_module)).parameters
    shared = list(found.values())[: len(wanted)]
    assert [(one.name, one.default, one.kind) for one in shared] == [
        (other.name, other.default, other.kind) for other in wanted.values()
    ]
    for parameter in list(found.values())[len(wanted) :]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, parameter
        assert parameter.default is not inspect.Parameter.empty, parameter
