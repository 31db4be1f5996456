"""The pages of `.pte` files, read as text; tests/browser opens them in a browser."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowerdeck import inspect
from lowerdeck import serializer as pte
from lowerdeck.inspect.report.embed import clip, json_for_page, number
from lowerdeck.inspect.report.pairing import pair_rows
from lowerdeck_files.payloads import convolution, payload
from lowerdeck_files.payloads import program as delegated
from lowerdeck_files.programs import add_delegates, program, tensor

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>\u202e\ud800'\"&"


def data_of(page: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', page)
    data: dict[str, Any] = json.loads(found)
    return data


def small_program(word: str = "weight", blob: bytes = b"inputs 1\nsin,0") -> Any:
    """A convolution and a delegate, with ``word`` wherever a file can hold a text."""
    values = [
        tensor([1, 3, 8, 8], at=0),
        tensor([4, 3, 3, 3], index=1, name=word),
        *(pte.Int(2**62), pte.Double(float("nan")), pte.IntList([2, 99]), pte.String(word)),
        tensor([1, 4, 8, 8], at=768),
        tensor([1, 4, 8, 8], at=1792),
    ]
    steps = ("name.out", [*range(7), 6]), pte.DelegateCall(0, [6, 7])
    made = program(values, *steps, constants=[bytes(432)], memory=2816, inputs=[0], outputs=[7])
    specs = [(word, word.encode(errors="replace")), ("k", b"\xff\x00")]
    add_delegates(made, blob, backend=word, specs=specs)
    (plan,) = made.execution_plan
    plan.name, plan.operators = word, [pte.Operator(word, "out")]
    plan.chains[0].stacktrace = [
        pte.FrameList([pte.Frame(word, 3, word, word)]),
        pte.FrameList([]),
    ]
    made.named_data = [pte.NamedData(word, b"1234")]
    return made


def method_of(made: Any) -> Any:
    (method,) = data_of(inspect.html_report(made))["file"]["methods"]
    return method


def test_a_page_needs_nothing_else_and_admits_only_its_own_script() -> None:
    page = inspect.html_report(small_program(), title="model.pte")
    assert "<title>model.pte</title>" in page
    links = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)""", page)
    assert links == ["data:,"]
    assert not re.findall(r"https?://|@import|url\(", page)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src &#x27;none&#x27;" in policy
    assert "unsafe" not in policy


def test_hostile_names_cannot_leave_the_data() -> None:
    honest = inspect.html_report(small_program(), title="t")
    hostile = inspect.html_report(small_program(HOSTILE), title=HOSTILE)
    assert hostile.count("<script") == honest.count("<script") == 2
    assert "<img" not in hostile
    assert "<!--" not in hostile
    hostile.encode()
    assert "\u202e" not in hostile
    assert data_of(hostile)["file"]["methods"][0]["name"] == pte.printable(HOSTILE)


def test_what_is_in_the_program_is_in_the_page() -> None:
    file = data_of(inspect.html_report(small_program()))["file"]
    (method,) = file["methods"]
    assert method["instructions"]["kind"] == "kd"
    assert method["operators"] == [
        {"name": "weight.out", "calls": 1, "written": 1024, "read": 768 + 432}
    ]
    assert method["arenas"][0]["blocks"] == [
        [0, 0, 768, 0, 0],
        [6, 768, 1024, 0, 1],
        [7, 1792, 1024, 1, 1],
    ]
    texts = [file["texts"][number] for number in method["values"]["text"]]
    assert texts[0] == "float32[1, 3, 8, 8]"
    assert texts[2:6] == [str(2**62), "nan", f"[{2**62}, %99]", '"weight"']
    assert method["values"]["role"] == "ic----to"
    assert [item["nbytes"] for item in file["stored"]] == [432, 14, 4]
    (delegate,) = method["delegates"]
    assert delegate["preview"] == {"text": "inputs 1\nsin,0", "more": False}
    assert delegate["specs"][1] == {"key": "k", "value": "\\xff\\x00"}
    assert (delegate["ops"], delegate["graph"]) == ([], -1)


def test_a_page_of_two_programs_tells_what_changed() -> None:
    old, new = small_program(), small_program(blob=b"other")
    new.constant_buffer[1] = pte.Buffer(b"\1" + bytes(431))
    data = data_of(inspect.html_diff(old, new, titles=("a", "b")))
    assert data["methods"][0]["rows"] == [[0, 0], [1, 1]]
    assert [(c["kind"], c["change"]) for c in data["stored"]] == [
        ("constants", "changed"),
        ("delegate", "changed"),
    ]
    assert data_of(inspect.html_diff(old, small_program()))["stored"] == []


def test_a_file_has_a_map_of_all_its_bytes() -> None:
    program = small_program()
    program.constant_buffer[1] = pte.Buffer(b"w" * 432)
    data = pte.serialize_pte(program)
    with pte.PteFile(data) as opened:
        file = data_of(inspect.html_report(opened))["file"]
    assert file["size"] == len(data)
    parts = sorted((part["offset"], part["nbytes"]) for part in file["sections"])
    ends = [0, *(offset + nbytes for offset, nbytes in parts)]
    assert [offset for offset, _ in parts] == ends[:-1]
    assert ends[-1] == len(data)
    kinds = [part["kind"] for part in file["sections"] if part["kind"] != "unused"]
    assert kinds == ["program", "constants", "delegate", "named"]
    stored = {item["kind"]: item for item in file["stored"]}
    start = stored["constants"]["offset"]
    assert data[start : start + 432] == b"w" * 432
    assert data[stored["delegate"]["offset"] :].startswith(b"inputs 1")
    assert data[stored["named"]["offset"] :].startswith(b"1234")


def test_a_nameless_constant_that_only_moved_has_not_changed() -> None:
    old, new = small_program(), small_program()
    for made, first in ((old, b"a"), (new, b"new")):
        made.execution_plan[0].values[1].val.extra_tensor_info = None
        made.constant_buffer[1:] = [pte.Buffer(first), pte.Buffer(b"kept")]
    assert [(c["name"], c["change"]) for c in data_of(inspect.html_diff(old, new))["stored"]] == [
        ("constants 1", "added"),
        ("constants 1", "removed"),
    ]


@pytest.mark.parametrize(
    ("args", "outs", "read", "written"),
    [
        # Work in place reads what it writes.
        ([6, 2, 6, 6], 2, 1024, 1024),
        # Lists of results are no arguments.
        ([0, 6, 7, 8], 3, 768, 2048),
    ],
)
def test_bytes_of_a_call(args: list[int], outs: int, read: int, written: int) -> None:
    made = small_program()
    plan = made.execution_plan[0]
    plan.values.append(pte.EValue(pte.TensorList([6, 7])))
    plan.chains[0].instructions[0] = pte.Instruction(pte.KernelCall(0, args))
    method = method_of(made)
    (operator,) = method["operators"]
    assert method["instructions"]["outs"] == [outs, 0]
    assert (operator["read"], operator["written"]) == (read, written)


def test_methods_of_one_side_only_are_shown() -> None:
    old, new = small_program("a"), small_program("b")
    methods = data_of(inspect.html_diff(old, new))["methods"]
    assert [(m["old"], m["new"]) for m in methods] == [(0, -1), (-1, 0)]
    assert methods[0]["rows"] == [[0, -1], [1, -1]]


def _wild() -> Any:
    """Return a program whose indices lead nowhere."""
    made = program([tensor([2**31] * 16)], pte.KernelCall(5, [99, -3]), inputs=[7], outputs=[-9])
    add_delegates(made, b"")
    made.backend_delegate_data.clear()
    return made


@pytest.mark.parametrize(
    "strange", [pte.Program(), pte.Program(execution_plan=[pte.ExecutionPlan("empty")]), _wild()]
)
def test_a_strange_program_has_a_page(strange: pte.Program) -> None:
    assert data_of(inspect.html_report(strange))["mode"] == "report"
    assert data_of(inspect.html_diff(strange, small_program()))["mode"] == "diff"


@given(st.data())
def test_whatever_the_reader_accepts_has_a_page(data: st.DataObject) -> None:
    spoiled = bytearray(pte.serialize_pte(small_program()))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(spoiled) - 1))
        spoiled[position] = data.draw(st.integers(0, 255))
    try:
        file = pte.PteFile(bytes(spoiled))
        file.program()
    except pte.FormatError:
        return
    assert data_of(inspect.html_report(file))["mode"] == "report"


@given(st.binary(max_size=5000), st.booleans())
def test_any_blob_has_a_preview(blob: bytes, broken: bool) -> None:
    whole = b"\0\0\0\0XH00" + blob if broken else blob
    (delegate,) = method_of(small_program(blob=whole))["delegates"]
    assert ("text" in delegate["preview"]) != ("hex" in delegate["preview"])


def test_an_xnnpack_delegate_shows_its_nodes_with_types_and_sizes() -> None:
    file = data_of(inspect.html_report(delegated(payload(convolution(), bytes(64)))))["file"]
    (delegate,) = file["methods"][0]["delegates"]
    assert delegate["ops"] == [["Conv2d", 1]]
    assert file["texts"][delegate["graph"]] == (
        "Conv2d(qint8[1, 4, 4, 3] scale 0.5 zero -3, "
        "qcint8[2, 3, 3, 3] scales 0.25 to 0.5 for each channel constant of 54 B, "
        "qcint32[2] scales 1 for each channel constant of 8 B) -> "
        "qint8[1, 4, 4, 2] scale 0.5 zero -3"
    )


def test_a_hex_dump_shows_offset_bytes_and_letters() -> None:
    (delegate,) = method_of(small_program(blob=bytes(range(60, 79)) + b"\0"))["delegates"]
    assert delegate["preview"]["hex"].splitlines() == [
        "00000000  3c 3d 3e 3f 40 41 42 43  44 45 46 47 48 49 4a 4b  |<=>?@ABCDEFGHIJK|",
        "00000010  4c 4d 4e 00                                       |LMN.|",
    ]


ANY_TEXT = st.text(st.characters(codec=None), max_size=50)
FEW_KINDS = st.lists(st.sampled_from("abcd"), max_size=40)


@given(FEW_KINDS, FEW_KINDS)
def test_each_item_is_there_once_in_order_and_only_equals_are_together(
    old: list[str], new: list[str]
) -> None:
    rows = pair_rows(old, new)
    assert [left for left, _ in rows if left >= 0] == list(range(len(old)))
    assert [right for _, right in rows if right >= 0] == list(range(len(new)))
    assert all(old[left] == new[right] for left, right in rows if left >= 0 and right >= 0)


@pytest.mark.parametrize(
    ("old", "new", "pairs", "count"),
    [
        # One inserted item is the only difference.
        ([*"abcdefg" * 700], [*"abcdefg" * 350, "new", *"abcdefg" * 350], 4900, 4901),
        # Items that occur once anchor a large gap.
        (["x", *range(2000), "y"], ["p", *range(0, 2000, 2), "q"], 1000, 2004),
        # A large gap without anchors is given up as a whole.
        (["a", *"xy" * 500, "b"], ["c", *"yx" * 500, "d"], 0, 2004),
    ],
)
def test_long_sequences_are_paired(
    old: list[object], new: list[object], pairs: int, count: int
) -> None:
    rows = pair_rows(old, new)
    assert (sum(-1 not in row for row in rows), len(rows)) == (pairs, count)


@given(ANY_TEXT)
def test_no_text_can_end_its_element_or_begin_another(text: str) -> None:
    shown = json_for_page({"name": text + "</script><!--<script>&lt;", text: 1})
    assert not set(shown) & set("<>&")
    assert shown.isascii()
    assert json.loads(shown)["name"].startswith(text)


@given(st.integers() | st.sampled_from([10**5000, -(10**5000)]))
def test_numbers_stay_exact_where_a_browser_is_exact_and_finite_everywhere(value: int) -> None:
    shown = number(value)
    assert shown == (value if abs(value) <= 2**53 else shown)
    assert abs(shown) <= 2.0**64
    assert json.loads(json_for_page(shown)) == shown
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_for_page([math.inf])


@given(ANY_TEXT, st.integers(2, 60))
def test_a_long_text_keeps_its_ends(text: str, length: int) -> None:
    shown = clip(text, length)
    assert shown.isprintable() or any(c.isspace() for c in shown)
    assert shown.startswith(pte.printable(text[: length // 2]))
    assert shown.endswith(pte.printable(text[-(length // 2) :]))
    # A character takes at most ten as an escape.
    assert len(shown) <= 10 * (length + 3)
