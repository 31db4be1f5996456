"""The page of a graph, used as a person would use it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
keys = pytest.importorskip("selenium.webdriver.common.keys", reason="selenium is not installed")

from lowerdeck.lowered_module import DELEGATION_TAG, graph_html  # noqa: E402

Keys = keys.Keys
COUNTER = "return document.querySelector('#nodes .counter').textContent"
DETAIL = "return document.querySelector('#nodes .detail').innerText"


class Repeats(torch.nn.Module):
    """A chain of relu and tanh."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.tanh(torch.relu(x))
        return x


@pytest.fixture(scope="module")
def page_of():
    def make(times: int) -> str:
        program = torch.export.export(Repeats(times), (torch.ones(2),))
        reasons = {}
        for number, node in enumerate(
            program.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
        ):
            node.meta[DELEGATION_TAG] = f"part {number}"
        for node in program.graph.find_nodes(
            op="call_function", target=torch.ops.aten.tanh.default
        ):
            reasons[node.name] = "the backend has no <b>tanh</b>"
        return graph_html(program, reasons=reasons, title="repeats")

    return make


def test_left_out_nodes_say_why(page_of, show):
    page = show(page_of(10))
    assert page.complaints() == []
    tiles = "[...document.querySelectorAll('.tiles dd')].map((d) => d.firstChild.data)"
    assert page.ask(f"return {tiles}") == ["20", "10", "10", "10"]
    left = page.ask("return document.querySelector('#left').innerText")
    assert "the backend has no <b>tanh</b>" in left
    page.ask("document.getElementById('only-left-out').click()")
    page.settle()
    assert page.ask(COUNTER) == "10 of 22 nodes"
    page.ask("document.querySelector('.graph-nodes .row').click()")
    assert "the backend has no <b>tanh</b>" in page.ask(DETAIL)
    page.resize(360)
    assert page.ask("return document.documentElement.scrollWidth") <= 360
    assert page.ask("return document.querySelector('.graph-nodes .op').clientWidth") > 150


def test_search_and_keyboard_walk_the_graph(page_of, show):
    page = show(page_of(10))
    page.keys("/")
    page.keys("part 7")
    assert page.ask(COUNTER) == "1 of 22 nodes"
    page.keys(Keys.ESCAPE)
    page.ask("document.querySelector('canvas.graph').focus()")
    page.keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert page.ask(DETAIL).startswith("tanh\n")
    page.keys(Keys.ARROW_UP)
    assert page.ask(DETAIL).startswith("relu\n")


def test_many_nodes_draw_only_what_one_can_see(page_of, show):
    nodes = "return document.querySelectorAll('*').length"
    few = show(page_of(12)).ask(nodes)
    page = show(page_of(1000))
    assert page.complaints() == []
    assert page.ask(COUNTER) == "2,002 of 2,002 nodes"
    # The table of partitions holds 500 rows at most, of fifteen elements each.
    assert page.ask(nodes) < few + 16 * 500
