"""The page on moving from exir: exir's code, the same with one import changed, and ours agree."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lowerdeck.serializer import deserialize_ptd, open_pte
from lowerdeck_zoo import official
from tests.interop.side_by_side import COMPAT, EXIR, OURS, PAGE, SIDES, Done, done, tasks

# What exir, torchao's annotator and the devtools import, beside torch.
_NEEDED = ("executorch", "flatbuffers", "pandas", "ruamel", "tabulate", "torchao")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
    pytest.mark.skipif(bool(_MISSING), reason=f"exir needs {', '.join(_MISSING)}"),
]
TEXT = PAGE.read_text()
NAMES = [task.name for task in tasks(TEXT)[1]]
# By the methods of the files that take the model's inputs; the official runtime has no backend of
# the page's own.
METHODS: dict[str, list[str]] = {
    "Put several methods into one file": ["forward", "features"],
    "Write a backend": [],
}
# Ours chooses other nodes to quantise, and takes square roots and exponentials otherwise.
STEPS = {"Quantise for XNNPACK": 0.02}
OTHER_MODELS = {"Change the graph"}
Sides = dict[str, dict[str, Done]]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    """What each side makes of each task."""
    folder = tmp_path_factory.mktemp("sides")
    return {side: done(side, folder / side, TEXT) for side in SIDES}


@pytest.fixture(scope="module")
def eager(sides: Sides) -> tuple[tuple[torch.Tensor], torch.Tensor]:
    """The inputs of the page's model, and what it gives for them."""
    inputs, outputs = torch.load(next(iter(sides[OURS].values())).folder.parent / "eager")
    return inputs, outputs


def ran(made: Done, inputs: tuple[torch.Tensor], methods: list[str]) -> list[Any]:
    """Return what the official runtime makes of a side's file, method by method."""
    data = next(iter(made.folder.glob("*.ptd")), None)
    calls = [official.Call(inputs, method) for method in methods]
    outcome = official.run(made.folder / "model.pte", calls, data=data)
    assert isinstance(outcome, official.Ran), outcome
    return [one for (one,) in outcome.outputs]


@pytest.mark.parametrize("name", NAMES)
def test_both_sides_and_the_changed_import_give_the_same_numbers(
    name: str, sides: Sides, eager: tuple[tuple[torch.Tensor], torch.Tensor]
) -> None:
    inputs, wanted = eager
    found = {
        side: ran(sides[side][name], inputs, METHODS.get(name, ["forward"])) for side in SIDES
    }
    for side in SIDES:
        if sides[side][name].outputs is not None:
            told = sides[side][name].outputs
            found[side].append(told[0] if isinstance(told, list | tuple) else told)
    assert found[EXIR], "nothing was compared"
    step = STEPS.get(name, 1e-5)
    if name in OTHER_MODELS:
        assert not torch.allclose(found[EXIR][0], wanted, atol=1e-4), "nothing was changed"
    else:
        torch.testing.assert_close(found[EXIR][0], wanted, atol=step, rtol=0)
    torch.testing.assert_close(found[COMPAT], found[EXIR], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[OURS], found[EXIR], atol=step, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_files_call_the_same_backends_and_offer_the_same_methods(name: str, sides: Sides) -> None:
    seen = []
    for side in SIDES:
        with open_pte(sides[side][name].folder / "model.pte") as file:
            plans = file.program().execution_plan
            backends = {plan.name: [one.id for one in plan.delegates] for plan in plans}
            seen.append(backends)
    assert seen[0] == seen[1] == seen[2]


def test_a_backend_of_the_page_makes_the_same_bytes(sides: Sides) -> None:
    for side in SIDES:
        with open_pte(sides[side]["Write a backend"].folder / "model.pte") as file:
            (delegate,) = file.delegates
            assert bytes(delegate.data) == b"> aten.gelu.default"


def test_weights_are_in_the_files_that_were_asked_for(sides: Sides) -> None:
    keys = []
    for side in SIDES:
        folder = sides[side]["Keep the weights in a file of their own"].folder
        (data,) = folder.glob("*.ptd")
        assert (folder / "model.pte").stat().st_size < 20_000 < data.stat().st_size
        folder = sides[side]["Choose which weights go to which file"].folder
        (data,) = folder.glob("*.ptd")
        assert data.name == "head.ptd"
        keys.append(set(deserialize_ptd(data.read_bytes()).entries))
    assert keys[0] == keys[1] == keys[2] == {"head.weight", "head.bias"}


def test_the_changed_import_is_the_only_change() -> None:
    for task in tasks(TEXT)[1]:
        old, new = (task.code[side].splitlines() for side in (EXIR, COMPAT))
        changed = [pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]]
        assert len(changed) == 1, task.name
