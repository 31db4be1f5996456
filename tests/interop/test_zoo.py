"""Every model of the zoo, emitted, run in the official runtime and in the runner, equals eager."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from lowerdeck.emitter import EmittedProgram, emit
from lowerdeck.runner import load
from tests.interop import official
from tests.interop.zoo import MODELS, Model

CHOSEN = [pytest.param(m, id=m.name, marks=pytest.mark.heavy if m.heavy else ()) for m in MODELS]

pytestmark = pytest.mark.filterwarnings("ignore")


def _emitted(model: Model) -> tuple[list[tuple[tuple[Any, ...], Any]], EmittedProgram]:
    """Return eager's results for every call, in order, on its own state, and the program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, program, calls = model.export()
    eager = copy.deepcopy(module)
    results = []
    for call in calls:
        with torch.no_grad():
            results.append((copy.deepcopy(call), copy.deepcopy(eager(*copy.deepcopy(call)))))
    return results, emit(program)


def _compare(model: Model, found: Any, expected: Any) -> None:
    found, expected = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            assert isinstance(one, torch.Tensor)
            torch.testing.assert_close(one, other, atol=model.atol, rtol=1e-3, equal_nan=True)
        else:
            assert one == other


@pytest.mark.skipif(not official.available(), reason=official.REASON)
@pytest.mark.parametrize("model", CHOSEN)
def test_official_runtime_equals_eager(model: Model) -> None:
    results, emitted = _emitted(model)
    calls = [official.Call(tuple(pytree.tree_leaves(call))) for call, _ in results]
    outcome = official.run(emitted.to_bytes(), calls)
    assert isinstance(outcome, official.Ran), outcome
    for outputs, (_, expected) in zip(outcome.outputs, results, strict=True):
        _compare(model, outputs, expected)


@pytest.mark.parametrize("model", CHOSEN)
def test_runner_equals_eager_and_the_memory_plan_holds(model: Model) -> None:
    results, emitted = _emitted(model)
    program = load(emitted.to_bytes(), memory="poison")
    for call, expected in results:
        _compare(model, program.run("forward", *call), expected)
