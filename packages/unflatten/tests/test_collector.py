"""Unflattening leaves the garbage collector, and no garbage, behind."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

from lowerdeck.unflatten import collector, unflatten


@pytest.fixture(scope="module", name="program")
def _program() -> ExportedProgram:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(20)])
    return export(model, (torch.ones(1, 2),))


def test_nothing_is_left_for_the_collector(program: ExportedProgram) -> None:
    # What earlier tests left to torch's finalizers takes more than one round.
    while gc.collect():
        pass
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        kept = unflatten(program)
        gc.collect()
        # What torch leaves of its own export is not ours.
        left = {type(value).__name__ for value in gc.garbage}
        assert not left & {
            "Frame",
            "Item",
            "Scope",
            "Region",
            "Node",
            "Graph",
            "InterpreterModule",
        }
        assert kept is not None
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _fail_while_held() -> None:
    with collector.collector_held():
        assert not gc.isenabled()
        raise RuntimeError("stop")


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_on_or_off_as_before(program: ExportedProgram, is_on: bool) -> None:
    if not is_on:
        gc.disable()
    try:
        unflatten(program)
        assert gc.isenabled() is is_on
        with pytest.raises(RuntimeError, match="stop"):
            _fail_while_held()
        assert gc.isenabled() is is_on
    finally:
        gc.enable()
