"""The page of `nox -s demo`: numbers of both, and the reports of our files in it."""

from __future__ import annotations

from examples.beside_page import page
from lowerdeck.inspect import html_report

ROWS = [
    ("float", "Lowerdeck", {"lowered": 0.5, "run": 0.016, "size": 46_000_000, "error": 6e-7}),
    ("float", "ExecuTorch", {"lowered": 5.0, "run": 0.032, "size": 47_000_000, "error": 5e-7}),
]
CELLS = "return [...document.querySelectorAll('tbody tr')].map((row) => row.innerText)"
BARS = """return [...document.querySelectorAll('.bar')].map(
  (cell) => getComputedStyle(cell).getPropertyValue('--part'))"""
INSIDE = "return document.querySelector('iframe').contentDocument"


def test_every_number_says_where_it_is_from_and_a_report_works_inside(program, show):
    shown = show(page(ROWS, {"float <1>": html_report(program(60), title="a.pte")}, "runtime 1.4"))
    assert shown.complaints() == []
    assert shown.ask(CELLS) == [
        "float\tLowerdeck\t500.0 ms\t16.0 ms\t46.00 MB\t6.0e-07",
        "float\tExecuTorch\t5,000.0 ms\t32.0 ms\t47.00 MB\t5.0e-07",
    ]
    assert shown.ask(BARS) == ["10.0%", "50.0%", "100.0%", "100.0%"]
    told = shown.ask("return document.body.innerText")
    assert "runtime 1.4" in told
    assert "lowerdeck.runner" in told
    assert shown.ask("return document.querySelector('h2').textContent") == "float <1>"
    assert shown.ask(f"{INSIDE}.documentElement.dataset.ready") == "true"
    assert shown.ask(f"{INSIDE}.querySelector('h1').textContent") == "a.pte"
    assert shown.ask("return document.querySelector('iframe').contentWindow.scrollY") > 100
    assert shown.ask("return scrollY") == 0
    assert shown.ask("return performance.getEntriesByType('resource').length") == 0
    shown.resize(700)
    assert shown.ask("return document.documentElement.scrollWidth") <= 700
