"""The page of two files side by side."""

from __future__ import annotations

import pytest

from lowerdeck.inspect import html_diff

COUNTER = "return document.querySelector('#instructions .counter').textContent"


def test_it_shows_what_changed_and_nothing_else_on_demand(program, show):
    page = show(html_diff(program(60), program(64, marked="2"), titles=("old.pte", "new.pte")))
    assert page.complaints() == []
    assert page.ask("return document.querySelector('h1').textContent") == "old.pte → new.pte"
    counter = page.ask(COUNTER)
    assert counter == "5 differences, 65 of 65 rows shown"
    page.ask("document.getElementById('only-differences').click()")
    page.settle()
    assert page.ask(COUNTER) == "5 differences, 5 of 65 rows shown"
    assert page.ask("return document.querySelectorAll('.sides .row.added').length") == 4
    assert page.ask("return document.querySelectorAll('.sides .row.changed').length") == 1


def test_the_same_file_twice_has_no_difference(program, show):
    page = show(html_diff(program(20), program(20)))
    assert page.ask(COUNTER).startswith("0 differences")
    assert "same bytes" in page.ask("return document.querySelector('#stored').textContent")


def test_a_choice_is_explained_on_both_sides(program, show):
    page = show(html_diff(program(20), program(20)))
    page.ask("document.querySelectorAll('.sides .row')[2].click()")
    halves = page.ask(
        "return [...document.querySelectorAll('#instructions .pair h3')].map(e => e.textContent)"
    )
    assert halves == ["2 aten::convolution.out"] * 2


def test_twenty_thousand_rows_draw_only_what_one_can_see(program, show):
    nodes = "return document.querySelectorAll('*').length"
    few = show(html_diff(program(200), program(201))).ask(nodes)
    page = show(html_diff(program(20_000), program(20_001)))
    assert page.ask(nodes) < few + 300
    assert page.complaints() == []


def test_delegates_that_differ_are_opened_to_their_operators(show):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from lowerdeck.emitter import emit
    from lowerdeck.lowered_module import to_backend
    from lowerdeck.xnnpack import XnnpackPartitioner

    def lowered(*layers):
        model = torch.nn.Sequential(*layers).eval()
        program = torch.export.export(model, (torch.ones(1, 4),))
        return emit(to_backend(program, XnnpackPartitioner())).program

    torch.manual_seed(0)
    first, relu, tanh = torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Tanh()
    old, new = lowered(first, tanh, first), lowered(first, tanh, relu, torch.nn.Sigmoid(), first)
    page = show(html_diff(old, new))
    assert page.complaints() == []
    rows = page.ask(
        "return [...document.querySelectorAll('.sides .row')].map((row) =>"
        " [row.querySelector('b').ariaLabel ?? 'same',"
        " ...[...row.querySelectorAll('.op')].map((op) => op.textContent.split(/[ (]/)[0])])"
    )
    assert rows[0][0] == "changed"
    assert ["added", "Sigmoid"] in rows
    assert [state for state, *names in rows if names == ["Tanh", "Tanh"]] == ["same"]
    different = sum(row[0] != "same" for row in rows)
    assert page.ask(COUNTER) == f"{different} differences, {len(rows)} of {len(rows)} rows shown"
    page.ask("document.querySelectorAll('.sides .row')[1].click()")
    assert "FullyConnected" in page.ask("return document.querySelector('.pair').innerText")
    page.ask("document.getElementById('search').focus()")
    page.keys("sigmoid")
    assert page.ask(COUNTER) == f"{different} differences, 1 of {len(rows)} rows shown"
    page.keys("nothing")
    assert page.ask(COUNTER) == f"{different} differences, no hits"
    same = show(html_diff(old, old))
    assert same.ask(COUNTER) == "0 differences, 1 of 1 row shown"


def test_it_shows_where_an_error_grows(show):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from lowerdeck.emitter import emit
    from lowerdeck.lowered_module import to_backend
    from lowerdeck.runner import load
    from lowerdeck.xnnpack import XnnpackPartitioner

    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)]
    x = torch.ones(1, 4)
    files, traces = [], []
    for scale in (1.0, 1.5):
        with torch.no_grad():
            layers[2].weight.mul_(scale)
            layers[2].bias.mul_(scale)
        exported = torch.export.export(torch.nn.Sequential(*layers).eval(), (x,))
        emitted = emit(to_backend(exported, XnnpackPartitioner()))
        files.append(emitted.program)
        trace = load(emitted.to_bytes()).run("forward", x, profile=True).chrome_trace()
        traces.append(trace)
    page = show(html_diff(*files, traces=tuple(traces)))
    assert page.complaints() == []
    told = page.ask(
        "return [...document.querySelectorAll('.sides .row')].map((row) =>"
        " [row.querySelector('.op').textContent.split(/[ (]/)[0],"
        " row.querySelector('.size').textContent])"
    )
    # The last layer is half as much again; what comes before it is the same.
    assert [one for one in told if one[0] != "delegate"] == [
        ["FullyConnected", "="],
        ["Tanh", "="],
        ["FullyConnected", "50 %"],
    ]
    assert told[0] == ["delegate", "50 %"]
    page.resize(360)
    assert page.ask("return document.documentElement.scrollWidth") <= 360
    without = show(html_diff(*files))
    assert without.ask("return document.querySelector('.sides .size')") is None
