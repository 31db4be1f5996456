"""Unflattening leaves the garbage collector, and no garbage, behind."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export
from torch.fx import Graph, Node

from lowerdeck.graph_fuser import Region
from lowerdeck.unflatten import InterpreterModule, unflatten
from lowerdeck.unflatten.calls.carrying import PRIVATE
from lowerdeck.unflatten.trace.call_tree import Frame
from lowerdeck.unflatten.trace.flat_items import Item, Scope


@pytest.fixture(scope="module", name="program")
def _program() -> ExportedProgram:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(20)])
    return export(model, (torch.ones(1, 2),))


def _living() -> dict[int, object]:
    """Return the objects that describe graphs and calls, garbage that waits included."""
    kinds = (Frame, Item, Scope, Region, Graph, Node)
    return {id(value): value for value in gc.get_objects() if issubclass(type(value), kinds)}


def test_nothing_is_left_for_the_collector(program: ExportedProgram) -> None:
    # Without the collector nothing goes but by its count of references: what is new and not part
    # of the result would have had to wait for it.
    gc.disable()
    try:
        before = _living()
        kept = unflatten(program)
        new = [value for key, value in _living().items() if key not in before]
    finally:
        gc.enable()
    modules = [module for module in kept.modules() if isinstance(module, InterpreterModule)]
    # Graphs of modules are built when they are asked for, each from one of a module like it.
    later = [module.__dict__[PRIVATE].made for module in modules]
    graphs = {kept.graph, *(made.like for made in later)}
    assert len(graphs) < len(modules) / 10
    strangers = [
        value for value in new if (value.graph if isinstance(value, Node) else value) not in graphs
    ]
    assert new
    assert not strangers


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_on_or_off_as_before(program: ExportedProgram, is_on: bool) -> None:
    if not is_on:
        gc.disable()
    try:
        unflatten(program)
        assert gc.isenabled() is is_on
    finally:
        gc.enable()
