"""The graph in the report of a file: boxes that open and close, and where they are."""

from __future__ import annotations

from importlib.resources import files
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowerdeck.inspect import html_report

torch = pytest.importorskip("torch", reason="torch is not installed")
keys = pytest.importorskip("selenium.webdriver.common.keys", reason="selenium is not installed")

from lowerdeck.emitter import emit  # noqa: E402
from lowerdeck.lowered_module import to_backend  # noqa: E402
from lowerdeck.runner import load  # noqa: E402
from lowerdeck.xnnpack import XnnpackPartitioner  # noqa: E402

Keys = keys.Keys
FOCUS = "document.querySelector('canvas.graph').focus()"
SHOWN = "return document.querySelector('canvas.graph').getAttribute('aria-label').split('.')[0]"
TOLD = "return document.querySelector('#graph .picked').textContent"
BUTTON = "document.querySelectorAll('#graph .zoom button')[{}].click()"
CHOSEN = "return document.querySelector('.instructions [aria-selected=true] .op')?.textContent"


class Net(torch.nn.Module):
    """Two blocks of two layers, seen as another shape in between."""

    def __init__(self) -> None:
        super().__init__()
        linear = torch.nn.Linear
        pairs = [torch.nn.Sequential(linear(4, 4), linear(4, 4)) for _ in range(2)]
        self.blocks = torch.nn.ModuleList(pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner in self.blocks:
            x = torch.relu(inner(x)).view(2, 2, 4).transpose(0, 1).reshape(4, 4)
        return x + x.abs()


@pytest.fixture(scope="module")
def emitted() -> dict[bool, Any]:
    """Return the network's file with plain kernels, and for XNNPACK."""
    program = torch.export.export(Net().eval(), (torch.ones(4, 4),))
    return {False: emit(program), True: emit(to_backend(program, XnnpackPartitioner()))}


def walked(page: Any) -> list[str]:
    """Go down from the first box along first edges; return what each box is called."""
    page.ask(FOCUS)
    page.keys(Keys.ARROW_DOWN)
    told = [page.ask(TOLD)]
    while True:
        page.keys(Keys.ARROW_DOWN)
        if (after := page.ask(TOLD)) == told[-1]:
            return [one.split(" · ")[0] for one in told]
        told.append(after)


def test_one_walks_from_the_input_to_the_output_and_through_views(emitted, show):
    page = show(html_report(emitted[False].program))
    assert page.complaints() == []
    way = walked(page)
    assert way[0].startswith("input %0")
    assert way[-1].startswith("output %")
    # No instruction makes the views between the blocks.
    assert [name.split("  ")[1] for name in way[1:-1]] == [
        *("aten::linear.out", "aten::linear.out", "aten::relu.out", "aten::transpose_copy.int_out")
        * 2,
        *("aten::abs.out", "aten::add.out"),
    ]


def test_operators_inside_a_delegate_are_linked(emitted, show):
    page = show(html_report(emitted[True].program))
    way = walked(page)
    assert way[0].startswith("input")
    assert [name for name in way if name == "FullyConnected"] == ["FullyConnected"] * 4
    assert way[-1].startswith("output")


def test_payloads_of_openvino_are_opened_and_linked_and_broken_ones_say_why(show):
    partitioner = pytest.importorskip("lowerdeck.openvino").OpenvinoPartitioner()
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3))
    program = torch.export.export(net.eval(), (torch.ones(1, 3, 8, 8),))
    made = emit(to_backend(program, partitioner)).program
    page = show(html_report(made))
    way = walked(page)
    assert way[0].startswith("input")
    assert way[1:-1] == ["Convolution", "Add", "ReLU", "Convolution", "Add"]
    assert way[-1].startswith("output")
    inside = "return document.querySelector('#delegates').textContent"
    assert "2 \N{MULTIPLICATION SIGN} Convolution" in page.ask(inside)
    assert "Convolution(fp32[1, 4, 6, 6], fp32[2, 4, 3, 3] constant of 288 B" in page.ask(inside)
    assert page.complaints() == []
    made.backend_delegate_data[0].data = bytes(64)
    page = show(html_report(made))
    assert "not opened, as BlobError: found a payload of 64 bytes" in page.ask(inside)
    assert page.complaints() == []


def test_modules_and_delegates_close_and_open(emitted, show):
    page = show(html_report(emitted[False].program))
    whole = page.ask(SHOWN)
    page.ask(BUTTON.format(1))
    page.settle()
    closed = page.ask(SHOWN)
    assert closed != whole
    assert [name.partition(" ")[0] for name in walked(page)][1] == "blocks"
    # The second box is the module: it opens, its first part is chosen and can be closed again.
    page.keys(*[Keys.ARROW_UP] * 12, Keys.ARROW_DOWN)
    assert page.ask(TOLD) == "blocks · 6 instructions"
    page.keys(Keys.ENTER)
    assert page.ask(TOLD).startswith("blocks.0 · ")
    page.keys(Keys.BACKSPACE)
    assert page.ask(TOLD) == "blocks · 6 instructions"
    assert page.ask(SHOWN) == closed
    page.ask(BUTTON.format(0))
    page.settle()
    assert page.ask(SHOWN) == whole


def test_two_clicks_open_a_delegate_while_a_search_is_on(emitted, show):
    page = show(html_report(emitted[True].program))
    page.ask(BUTTON.format(1))
    page.keys("/")
    page.keys("abs")
    page.ask(FOCUS)
    page.keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert "delegate XnnpackBackend" in page.ask(TOLD)
    page.ask(
        """
        const canvas = document.querySelector("canvas.graph");
        const box = canvas.getBoundingClientRect();
        // The rows stand in the middle; the delegate is the second one.
        const y = box.top + box.height / 2 - 52 * (arguments[0] / 2 - 1.5);
        const at = { clientX: box.left + box.width / 2, clientY: y };
        canvas.dispatchEvent(new MouseEvent("dblclick", at));
        """,
        int(page.ask(SHOWN).split()[2]),
    )
    page.settle()
    assert page.ask(TOLD).startswith("FullyConnected · ")
    assert page.complaints() == []


def test_the_list_and_the_graph_choose_together(emitted, show):
    page = show(html_report(emitted[False].program))
    page.ask("document.querySelectorAll('.instructions .row')[2].click()")
    assert page.ask(TOLD).startswith("0  aten::linear.out · ")
    page.ask(FOCUS)
    page.keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert page.ask(CHOSEN) == "aten::relu.out"


def test_a_box_tells_its_time(emitted, show):
    program = load(emitted[True].to_bytes(), debug=emitted[True])
    profile = program.run("forward", torch.ones(4, 4), profile=True)
    page = show(html_report(emitted[True].program, trace=profile.chrome_trace()))
    page.ask(FOCUS)
    page.keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert page.ask(TOLD).endswith((" µs", " ms"))


@st.composite
def graphs(draw: Any) -> list[list[int]]:
    """Return for each of some nodes those before it that it needs."""
    size = draw(st.integers(0, 40))
    return [
        draw(st.lists(st.integers(0, node - 1), max_size=3, unique=True)) if node else []
        for node in range(size)
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(graphs())
def test_a_node_is_below_what_it_needs_and_beside_its_row(show, needs):
    assets = files("lowerdeck.inspect") / "report/assets"
    code = "".join((assets / name).read_text() for name in ("format.js", "graph_layout.js"))
    places = show("").ask(f"{code} return layoutOf(arguments[0])", needs)
    assert len(places) == len(needs)
    rows: dict[int, list[float]] = {}
    for node, place in enumerate(places):
        assert all(places[other]["y"] < place["y"] for other in needs[node])
        rows.setdefault(place["y"], []).append(place["x"])
    for columns in rows.values():
        columns.sort()
        assert all(b - a >= 0.99 for a, b in pairwise(columns))
    assert not places or min(place["x"] for place in places) == 0
