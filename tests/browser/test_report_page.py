"""The report of one file, used as a person would use it."""

from __future__ import annotations

import pytest

from lowerdeck.inspect import html_report
from lowerdeck.serializer import AllocationDetails, Instruction, JumpFalseCall, KernelCall

keys = pytest.importorskip("selenium.webdriver.common.keys", reason="selenium is not installed")
Keys = keys.Keys

SELECTED = (
    "return document.querySelector('.instructions [aria-selected=true] .index')?.textContent"
)
DETAIL = "return document.querySelector('#instructions .detail h3')?.textContent"
COUNTER = "return document.querySelector('#instructions .counter').textContent"
PICKED = "return document.querySelector('#memory .picked').textContent"
NODES = "return document.querySelectorAll('*').length"


def test_it_loads_without_a_complaint_and_asks_nothing_of_the_network(program, show):
    page = show(html_report(program(60), title="net.pte"))
    assert page.complaints() == []
    assert page.ask("return document.documentElement.dataset.ready") == "true"
    assert page.ask("return performance.getEntriesByType('resource').length") == 0
    assert page.ask("return document.title") == "net.pte"
    assert page.ask("return document.querySelector('h1').textContent") == "net.pte"


def test_search_finds_operators_values_and_source_lines(program, show):
    page = show(html_report(program(60)))
    page.keys("/")
    page.keys("relu")
    assert page.ask(COUNTER) == "23 of 61 instructions"
    page.ask("document.getElementById('search').value = ''")
    page.keys("net.py:47")
    assert page.ask(COUNTER) == "1 of 61 instructions"
    assert page.ask("return document.querySelectorAll('#operators tbody tr').length") == 1
    page.keys(Keys.ESCAPE)
    assert page.ask(COUNTER) == "61 instructions"
    page.keys("block.8.conv.weight")
    assert page.ask(COUNTER) == "1 of 61 instructions"
    assert page.ask("return document.querySelector('#file .counter').textContent").startswith(
        "1 of 31"
    )


def test_the_list_is_walked_by_keyboard(program, show):
    page = show(html_report(program(60)))
    page.ask("document.querySelector('.instructions').focus()")
    # The first row is the module that all of them are from.
    page.keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert page.ask(SELECTED) == "1"
    assert page.ask(DETAIL) == "1 aten::relu.out"
    assert "net.py:41" in page.ask("return document.querySelector('.detail').textContent")
    page.keys(Keys.END)
    assert page.ask(SELECTED) == "60"
    assert page.ask(DETAIL) == "60 delegate DemoBackend"
    page.keys(Keys.PAGE_UP, Keys.HOME, Keys.ARROW_DOWN)
    assert page.ask(SELECTED) == "0"
    active = page.ask(
        "const list = document.querySelector('.instructions');"
        "return document.getElementById(list.getAttribute('aria-activedescendant'))?.textContent"
    )
    assert active.startswith("0aten::convolution.out")


def test_memory_is_walked_by_keyboard_and_leads_to_its_instruction(program, show):
    page = show(html_report(program(60)))
    page.ask("document.querySelector('canvas.memory').focus()")
    page.keys(Keys.ARROW_RIGHT)
    first = page.ask(PICKED)
    assert "float32[1, 16, 32, 32] · 65.5 kB · input" in first
    assert "born at 0" in first
    page.keys(Keys.END)
    last = page.ask(PICKED)
    assert "float32[1, 10]" in last
    assert "output" in last
    assert "born at 60 delegate DemoBackend" in last
    page.keys(Keys.ENTER)
    assert page.ask(SELECTED) == "60"


def test_live_bytes_are_the_bytes_that_any_value_covers(program, show):
    both = program(2, delegate=False)
    plan = both.execution_plan[0]
    plan.values[3].val.sizes = [1, 1, 1, 4]
    # The second result lies half in the first one; the state and the output lie elsewhere.
    first, second = (plan.values[index].val for index in (6, 7))
    start = first.allocation_info.memory_offset + first.nbytes // 2
    second.allocation_info = AllocationDetails.at(1, start)
    page = show(html_report(both))
    told = page.ask("return document.querySelector('#memory figcaption').textContent")
    assert first.nbytes * 1.5 + 64 + 40 == 49_256
    assert "49.3 kB live at most, at instruction 1" in told


def test_twenty_thousand_instructions_draw_only_what_one_can_see(program, show):
    few = show(html_report(program(60))).ask(NODES)
    page = show(html_report(program(20_000)))
    assert page.complaints() == []
    assert page.ask(NODES) < few + 150
    page.ask("document.querySelector('.instructions').focus()")
    page.keys(Keys.END)
    assert page.ask(SELECTED) == "20,000"
    page.keys("/")
    page.keys("block.19992.")
    assert page.ask(COUNTER) == "1 of 20,001 instructions"
    assert page.ask(NODES) < few + 150


HOSTILE = "</script><img src=x onerror=document.title='owned'><script>document.title='owned'//"


def test_hostile_names_are_shown_and_do_nothing(program, show):
    page = show(html_report(program(16, prefix=HOSTILE, marked=HOSTILE), title=HOSTILE))
    assert page.complaints() == []
    assert page.ask("return document.title") == HOSTILE
    assert page.ask("return document.images.length") == 0
    page.ask("document.querySelector('.instructions').focus()")
    page.keys(Keys.HOME)
    assert HOSTILE in page.ask("return document.querySelector('.detail').textContent")
    assert page.ask("return document.scripts.length") == 2


def test_a_program_whose_indices_lead_nowhere_is_shown(program, show):
    wild = program(8)
    plan = wild.execution_plan[0]
    plan.inputs, plan.outputs = [99], [-7]
    for place, args in enumerate([[], [-1, 10**6], [2**31]]):
        plan.chains[0].instructions[place] = Instruction(KernelCall(77, args))
    plan.chains[0].instructions[3] = Instruction(JumpFalseCall(-5, -9))
    page = show(html_report(wild))
    page.ask("document.querySelector('.instructions').focus()")
    page.keys(Keys.HOME, *[Keys.ARROW_DOWN] * 5)
    assert page.complaints() == []
    assert page.ask(SELECTED) == "4"
    page.keys("/")
    page.keys("relu")
    assert page.complaints() == []


def test_hover_tells_name_type_bytes_and_life(program, show):
    page = show(html_report(program(60)))
    page.ask(
        """
        const canvas = document.querySelector("canvas.memory");
        canvas.scrollIntoView();
        const box = canvas.getBoundingClientRect();
        // The first result, at instructions 0 to 8 in the picture of 61 instructions.
        const x = box.left + 74 + (4.5 / 61) * (box.width - 82);
        const tall = box.height - 64 - 38;
        const y = box.top + 8 + tall - (210000 / 720000) * tall;
        canvas.dispatchEvent(new MouseEvent("mousemove", { clientX: x, clientY: y }));
        """
    )
    page.settle()
    told = page.ask("return document.getElementById('tooltip').innerText")
    assert "%6" in told
    assert "float32[1, 8, 32, 32] · 32.8 kB · intermediate" in told
    assert "born at 0 aten::convolution.out" in told
    assert "dies at" in told
