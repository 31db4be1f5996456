"""Benchmark records, figures that do not depend on load, and the models that are measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks import xnnpack_models
from benchmarks.harness import Row, count_calls, growth_exponent, in_rounds
from benchmarks.page import MOST, page
from benchmarks.records import Record

ROWS = [
    Row("serializer", "write", 1.0, 4.0, "s", ">= 2x", True, "peer: theirs"),
    *(Row("serializer", f"read {number}", 1.5, 1.0, met=False) for number in range(60)),
]


def test_the_page_has_the_headline_and_what_is_lost_and_few_rows(tmp_path):
    Record("serializer", "nox -s bench", False, "0" * 12, rows=ROWS).save(tmp_path / "one.json")
    text = "\n".join(page([Record.load(tmp_path / "one.json")]))
    assert "1 of 61 goals are met" in text
    assert "`nox -s bench`; did not finish: cut short |" in text
    headline, lost = text.split("## Where we are not ahead")
    assert "| serializer | write (peer: theirs) | 1 s | 4 s | 4x | >= 2x | yes |" in headline
    assert lost.count("| serializer | read") == MOST - 1


def test_figures_that_load_cannot_change():
    numbers = iter([3.0, 9.0, 2.0, 8.0, 5.0, 1.0])
    assert in_rounds([lambda: next(numbers)] * 2) == [2.0, 1.0]
    calls = [(n, count_calls(lambda n=n: [repr(i) for i in range(n)])) for n in (100, 1000)]
    assert growth_exponent(calls) == pytest.approx(1, abs=0.02)


def test_a_model_whose_results_say_nothing_of_its_inputs_is_refused():
    torch.manual_seed(0)
    inputs, faint = (torch.randn(1, 8),), torch.nn.Linear(8, 4)
    torch.nn.init.normal_(faint.weight, std=1e-4)
    with pytest.raises(RuntimeError, match=r"result 0 of it changes by .* draw its weights"):
        xnnpack_models.check_dependence("it", faint, inputs)
    xnnpack_models.check_dependence("it", torch.nn.Linear(8, 4), inputs)
