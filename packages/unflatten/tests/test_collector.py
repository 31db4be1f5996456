"""Unflattening leaves the garbage collector, and no garbage, behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

from lowerdeck.unflatten import collector, unflatten


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(scope="module", name="program")
def _program() -> ExportedProgram:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(20)])
    return export(model, (torch.ones(1, 2),))


@pytest.fixture(name="freezes")
def _freezes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count how often objects are promoted."""
    calls: list[int] = []
    freeze = gc.freeze

    def counted() -> None:
        calls.append(1)
        freeze()

    with monkeypatch.context() as patch:
        patch.setattr(gc, "freeze", counted)
        yield calls


def test_nothing_is_left_for_the_collector(program: ExportedProgram) -> None:
    gc.collect()
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


def test_objects_are_promoted_once_between_full_collections(
    program: ExportedProgram, freezes: list[int]
) -> None:
    gc.collect()
    for _ in range(3):
        unflatten(program)
    assert len(freezes) == 1
    gc.collect()
    unflatten(program)
    assert len(freezes) == 2
    assert not gc.get_freeze_count()


def test_what_others_froze_stays_frozen(program: ExportedProgram, freezes: list[int]) -> None:
    gc.collect()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        unflatten(program)
        assert len(freezes) == 1
        assert gc.get_freeze_count() > frozen // 2
    finally:
        gc.unfreeze()


def test_garbage_of_the_caller_does_not_grow_old(program: ExportedProgram) -> None:
    gc.collect()
    ring = Ring()
    alive = weakref.ref(ring)
    del ring
    unflatten(program)
    assert alive() is None


def test_a_working_copy_of_the_graph_is_not_promoted(freezes: list[int]) -> None:
    program = export(nn.Sequential(nn.ReLU(inplace=True)), (torch.ones(1, 2),))
    gc.collect()
    unflatten(program)
    assert not freezes
