"""Benchmark records, figures that do not depend on load, and the models that are measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks import xnnpack_models
from benchmarks.harness import Row, chosen, count_calls, growth_exponent, in_rounds
from benchmarks.page import page
from benchmarks.records import Record, state_of

ROWS = [
    Row("serializer", "write", 1.0, 4.0, "s", ">= 2x", True, "peer: theirs"),
    Row("serializer", "growth", 1.5, unit="exponent", goal="<= 1.1", met=False),
]


def record(**changes: object) -> Record:
    fields = {"finished": True, "rows": ROWS, "wall": 90.0, "started": "2026-11-20 12:00"}
    return Record("serializer", "nox -s bench", False, "0" * 12, **(fields | changes))


def test_a_record_comes_back_as_it_was_saved(tmp_path):
    saved = record()
    saved.save(tmp_path / "records" / "serializer.json")
    assert Record.load(tmp_path / "records" / "serializer.json") == saved


def test_the_page_tells_when_how_and_what_was_missed():
    text = "\n".join(page([record(load_before=0.5, cores=2)]))
    assert "Made by `nox -s bench`, in 2 minutes" in text
    assert "| serializer | 2026-11-20 12:00 | 1.5 | 0.5 | 0.0 | `nox -s bench` |" in text
    assert "1 of 2 goals are met" in text
    assert "| serializer | write (peer: theirs) | 1 s | 4 s | 4x | >= 2x | yes |" in text
    broken = "\n".join(page([record(finished=False, error="KeyError: 1")]))
    assert "**serializer did not finish (KeyError: 1): not all its rows are here.**" in broken


def test_models_are_chosen_by_patterns():
    names = ["torchvision/a", "torchvision/b", "own/mlp"]
    assert chosen(names, []) == names
    assert chosen(names, ["own/*", "*/a"]) == ["torchvision/a", "own/mlp"]
    with pytest.raises(ValueError, match="found 'resnet', expected some of torchvision/a, "):
        chosen(names, ["resnet"])


def test_a_record_is_out_of_date_when_a_source_changes(monkeypatch, tmp_path):
    before = state_of("serializer")
    assert before == state_of("serializer")
    assert before != state_of("runner")


def test_figures_that_load_cannot_change():
    numbers = iter([3.0, 9.0, 2.0, 8.0, 5.0, 1.0])
    assert in_rounds([lambda: next(numbers)] * 2) == [2.0, 1.0]
    calls = [(n, count_calls(lambda n=n: [repr(i) for i in range(n)])) for n in (100, 1000)]
    assert growth_exponent(calls) == pytest.approx(1, abs=0.02)


def test_a_model_whose_results_say_nothing_of_its_inputs_is_refused():
    torch.manual_seed(0)
    inputs = (torch.randn(1, 8),)
    silent, faint = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    torch.nn.init.zeros_(silent.weight)
    torch.nn.init.normal_(faint.weight, std=1e-4)
    for model in (silent, faint):
        with pytest.raises(RuntimeError, match=r"result 0 of it changes by .* draw its weights"):
            xnnpack_models.check_dependence("it", model, inputs)
    xnnpack_models.check_dependence("it", torch.nn.Linear(8, 4), inputs)


@pytest.mark.parametrize("name", ["own/yolo", "own/unet_bilinear"])
def test_batch_norms_let_through_what_inputs_say(name):
    model, inputs = xnnpack_models.build(name)  # raises if they do not
    again, _ = xnnpack_models.build(name)
    assert not model.training
    for one, other in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert inputs[0].shape[0] == 1
