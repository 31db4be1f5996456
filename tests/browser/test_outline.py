"""The instructions of a report as an outline: modules that close, delegates opened, times."""

from __future__ import annotations

from typing import Any

import pytest

from lowerdeck.inspect import html_report

torch = pytest.importorskip("torch", reason="torch is not installed")
keys = pytest.importorskip("selenium.webdriver.common.keys", reason="selenium is not installed")

from lowerdeck.emitter import emit  # noqa: E402
from lowerdeck.lowered_module import to_backend  # noqa: E402
from lowerdeck.runner import load  # noqa: E402
from lowerdeck.xnnpack import XnnpackPartitioner  # noqa: E402

Keys = keys.Keys
ROWS = (
    "return [...document.querySelectorAll('.instructions .row')].map((row) =>"
    " row.querySelector('.op').textContent)"
)
COUNTER = "return document.querySelector('#instructions .counter').textContent"
DETAIL = "return document.querySelector('#instructions .detail').innerText"
CHOSEN = "return document.querySelector('.instructions [aria-selected=true] .op')?.textContent"


class Net(torch.nn.Module):
    """Two blocks of two layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        block = torch.nn.Sequential
        self.blocks = block(*(block(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)) for _ in "ab"))
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner in self.blocks:
            x = torch.relu(inner(x))
        return torch.nn.functional.softmax(self.head(x), -1)


@pytest.fixture(scope="module")
def emitted() -> dict[bool, Any]:
    """Return the network's file with plain kernels, and for XNNPACK."""
    program = torch.export.export(Net().eval(), (torch.ones(1, 4),))
    return {False: emit(program), True: emit(to_backend(program, XnnpackPartitioner()))}


PLAIN = [
    "▾ blocks",
    *("▾ blocks.0", "aten::linear.out", "aten::linear.out"),
    "aten::relu.out",
    *("▾ blocks.1", "aten::linear.out", "aten::linear.out"),
    *("aten::relu.out", "aten::linear.out", "aten::_softmax.out"),
]


def test_instructions_stand_under_the_modules_of_their_parameters(emitted, show):
    page = show(html_report(emitted[False].program))
    assert page.complaints() == []
    assert page.ask(ROWS) == PLAIN
    for name in ("instructions", "graph"):
        told = page.ask(f"return document.getElementById('{name}').innerText")
        assert "Modules are guessed from names of parameters" in told
    page.ask("document.querySelectorAll('.instructions .row')[2].click()")
    assert "of blocks.0.0" in page.ask(DETAIL)


def test_modules_close_and_open_by_keyboard_mouse_and_at_once(emitted, show):
    page = show(html_report(emitted[False].program))
    page.ask("document.querySelector('.instructions').focus()")
    page.keys(Keys.HOME, Keys.ARROW_DOWN, Keys.ARROW_LEFT)
    closed = [PLAIN[0], "▸ blocks.0", *PLAIN[4:]]
    assert page.ask(ROWS) == closed
    assert page.ask(CHOSEN) == "▸ blocks.0"
    # What is closed leads on to what holds it; to the right it opens, and leads into it.
    page.keys(Keys.ARROW_LEFT)
    assert page.ask(CHOSEN) == "▾ blocks"
    page.keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.ask(ROWS) == PLAIN
    assert page.ask(CHOSEN) == "aten::linear.out"
    page.ask("document.querySelector('.instructions .twist').click()")
    assert page.ask(ROWS) == ["▸ blocks", *PLAIN[8:]]
    page.ask("document.querySelectorAll('#instructions .zoom button')[0].click()")
    assert page.ask(ROWS) == PLAIN
    page.ask("document.querySelectorAll('#instructions .zoom button')[1].click()")
    assert page.ask(ROWS) == ["▸ blocks", *PLAIN[8:]]
    # From the picture of memory it leads to an instruction that is hidden.
    page.ask("document.querySelector('canvas.memory').focus()")
    page.keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ENTER)
    assert page.ask(CHOSEN) == "aten::linear.out"


def test_a_delegate_is_opened_to_its_operators(emitted, show):
    page = show(html_report(emitted[True].program))
    inside = ["FullyConnected"] * 5 + ["Softmax"]
    rows = page.ask(ROWS)
    assert rows[0] == "▾ delegate XnnpackBackend"
    assert [row for row in rows[1:] if row in {*inside}] == inside
    assert "fp32[1, 4]" in page.ask(
        "return document.querySelectorAll('.instructions .row')[1].textContent"
    )
    page.ask("document.querySelectorAll('.instructions .row')[1].click()")
    assert page.ask(DETAIL).startswith(
        "FullyConnected\n\nin 0 delegate XnnpackBackend\n\nfp32[1, 4]"
    )
    page.keys("/")
    page.keys("softmax")
    assert page.ask(COUNTER) == "0 of 1 instruction, 1 operator inside delegates"
    assert page.ask(ROWS) == ["▾ delegate XnnpackBackend", "Softmax"]


@pytest.mark.parametrize("delegated", [False, True])
def test_a_trace_tells_times_of_operators_inside_delegates_too(delegated, emitted, show):
    program = load(emitted[delegated].to_bytes(), debug=emitted[delegated])
    profile = program.run("forward", torch.ones(1, 4), profile=True)
    page = show(html_report(emitted[delegated].program, trace=profile.chrome_trace()))
    assert page.complaints() == []
    times = page.ask(
        "return [...document.querySelectorAll('.instructions .row')].map((row) =>"
        " [row.querySelector('.op').textContent, row.querySelector('.size').textContent])"
    )
    told = {name for name, time in times if time.endswith((" µs", " ms"))}
    assert ("FullyConnected" if delegated else "aten::linear.out") in told
    assert not any(name.startswith("▾ blocks") for name in told)
    named = page.ask(
        "return [...document.querySelectorAll('#operators tbody td:first-child')]"
        ".map((cell) => cell.textContent)"
    )
    expected = "delegate XnnpackBackend: FullyConnected" if delegated else "aten::linear.out"
    assert expected in named
    assert "emulates the runtime" in page.ask("return document.body.innerText")
