"""The page on moving from exir: exir's code, the same with one import changed, and ours agree."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lowerdeck.serializer import deserialize_ptd, open_pte
from lowerdeck_zoo import official
from tests.interop.side_by_side import PAGE, SIDES, done, tasks

# What exir, torchao's annotator and the devtools import, beside torch.
_NEEDED = ("executorch", "flatbuffers", "pandas", "ruamel", "tabulate", "torchao")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"exir needs {', '.join(_MISSING)}")
TASKS = tasks(PAGE.read_text())[1]
# By the methods of the files that take the model's inputs; the official runtime has no backend of
# the page's own.
METHODS: dict[str, list[str]] = {
    "Put several methods into one file": ["forward", "features"],
    "Write a backend": [],
}
# Ours chooses other nodes to quantise, and takes square roots and exponentials otherwise.
STEPS = {"Quantise for XNNPACK": 0.02}


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each side makes of all tasks."""
    return [done(side, tmp_path_factory.mktemp("sides") / side) for side in SIDES]


@pytest.mark.parametrize("name", TASKS)
def test_both_sides_and_the_changed_import_give_the_same_numbers(
    name: str, sides: list[dict[str, Any]]
) -> None:
    results, backends, step = [], [], STEPS.get(name, 1e-5)
    for side in sides:
        path = side["folder"] / name / "model.pte"
        with open_pte(path) as file:
            plans = file.program().execution_plan
            backends.append({plan.name: [one.id for one in plan.delegates] for plan in plans})
        data = next(iter(path.parent.glob("*.ptd")), None)
        calls = [official.Call(side["inputs"], one) for one in METHODS.get(name, ["forward"])]
        outcome = official.run(path, calls, data=data)
        assert isinstance(outcome, official.Ran), outcome
        results.append([one for (one,) in outcome.outputs])
        told = side["outputs"][name]
        if told is not None:
            results[-1].append(told[0] if isinstance(told, list | tuple) else told)
    assert backends[0] == backends[1] == backends[2]
    (exir, compat, ours), eager = results, sides[0]["eager"]
    assert torch.allclose(exir[0], eager, atol=step, rtol=0) == (name != "Change the graph")
    torch.testing.assert_close(compat, exir, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours, exir, atol=step, rtol=1e-5)


def test_files_hold_what_was_asked_for(sides: list[dict[str, Any]]) -> None:
    for side in sides:
        with open_pte(side["folder"] / "Write a backend" / "model.pte") as file:
            assert [bytes(one.data) for one in file.delegates] == [b"> aten.gelu.default"]
        folder = side["folder"] / "Keep the weights in a separate file"
        (data,) = folder.glob("*.ptd")
        assert (folder / "model.pte").stat().st_size < 20_000 < data.stat().st_size
        (data,) = (side["folder"] / "Choose which weights go to which file").glob("*.ptd")
        assert data.name == "head.ptd"
        entries = deserialize_ptd(data.read_bytes()).entries
        assert set(entries) == {"head.weight", "head.bias"}
