"""Each command shows the contents of delegates of any compiler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lowerdeck import serializer as pte
from lowerdeck.inspect import PayloadGraph, PayloadNode, PayloadValue
from lowerdeck.inspect.report import operators
from lowerdeck.inspect.report.operators import contents_of
from lowerdeck_files.payloads import (
    convolution,
    graph,
    linear,
    node,
    payload,
    program,
    relu,
    value,
)
from lowerdeck_files.programs import add_delegates
from lowerdeck_files.programs import program as made


def written(path: Path, *blobs: bytes, backend: str = "XnnpackBackend") -> str:
    """Write a program with delegates, and return its path."""
    path.write_bytes(pte.serialize_pte(add_delegates(made([]), *blobs, backend=backend)))
    return str(path)


def test_inspect_and_verify_name_the_release_that_a_file_needs(tmp_path: Path, shell: Any) -> None:
    values = [
        value(0, external_id=0, flags=1, datatype=int(pte.XnnDatatype.BF16)),
        value(1, external_id=1, flags=2),
    ]
    sine = graph(values, [node(pte.XnnOperator.SIN, input_id=0, output_id=1)])
    path = tmp_path / "a.pte"
    types = (pte.ScalarType.BFLOAT16, pte.ScalarType.FLOAT)
    path.write_bytes(pte.serialize_pte(program(payload(sine), types)))
    assert "needs ExecuTorch 1.5 or later: Sin of BF16, FP32" in shell("inspect", path).out
    assert json.loads(shell("inspect", path, "--json").out)["needs"]["release"] == "1.5"
    assert "warning: method 'forward'.delegates[0]" in shell("verify", path).out
    assert "needs ExecuTorch" not in shell("inspect", written(path, payload(relu()))).out


def test_inspect_tells_operators_types_scales_and_bytes(tmp_path: Path, shell: Any) -> None:
    path = written(tmp_path / "a.pte", payload(convolution(), bytes(64)), payload(linear()), b"x")
    text = shell("inspect", path).out
    assert "; 1 Conv2d; constants 62 B" in text
    assert "; 1 Convert, 1 FullyConnected; constants 72 B" in text
    first, second, third = json.loads(shell("inspect", path, "--json").out)["delegates"]
    assert first["payload"]["operators"] == {"Conv2d": 1}
    assert first["payload"]["constant_bytes"] == 54 + 8
    (line,) = first["payload"]["nodes"]
    assert line.startswith("Conv2d(qint8[1, 4, 4, 3] scale 0.5 zero -3, qcint8[2, 3, 3, 3]")
    assert "scales computed at run time" in second["payload"]["nodes"][1]
    assert "scales for each 32 constant of 64 B" in second["payload"]["nodes"][1]
    assert third["payload"] is None
    assert "TruncatedError: file at byte 0: found 1 bytes" in third["closed"]
    assert (first["closed"], second["closed"]) == ("", "")


def test_diff_tells_which_operators_changed(tmp_path: Path, shell: Any) -> None:
    old = written(tmp_path / "old.pte", payload(relu()))
    new = written(tmp_path / "new.pte", payload(convolution(), bytes(64)))
    lines = shell("diff", old, new, status=1).out.splitlines()
    told = "method forward: delegate 0:"
    assert f"{told} - Clamp(fp32[2, 3]) -> fp32[2, 3], limits 0 to 1" in lines
    assert sum(line.startswith(f"{told} + Conv2d(qint8") for line in lines) == 1
    shell("diff", old, old)


def test_many_nodes_are_cut_and_counted() -> None:
    nodes = [node(pte.XnnOperator.ABS, input_id=0, output_id=0) for _ in range(500)]
    found = contents_of(memoryview(payload(graph([value(0)], nodes))))
    assert (len(found.lines), found.left_out, found.operators) == (400, 100, {"Abs": 500})


def test_the_operators_of_a_payload_are_linked_to_each_other_and_to_its_arguments() -> None:
    values = [value(0, external_id=0), value(1, external_id=1), value(2), value(3, external_id=2)]
    nodes = [
        node(pte.XnnOperator.ABS, input_id=1, output_id=2),
        node(pte.XnnOperator.ADD, input1_id=2, input2_id=0, output_id=3),
        # It reads what it makes itself: a broken payload must not lead in circles.
        node(pte.XnnOperator.ADD, input1_id=7, input2_id=3, output_id=7),
    ]
    found = contents_of(memoryview(payload(graph(values, nodes))))
    assert (found.links, found.results) == (((-2,), (0, -1), (1,)), {2: 1})


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[PayloadGraph | Exception], None]:
    """Return a function that installs what opens payloads of the backend Mine, or fails to."""

    def _install(answer: PayloadGraph | Exception) -> None:
        failing = isinstance(answer, Exception)
        opener = Mock(side_effect=answer) if failing else Mock(return_value=answer)
        entry = Mock(load=Mock(return_value=opener), value="mine:open_payload")
        monkeypatch.setattr(operators, "_openers", lambda: {"Mine": entry})

    return _install


def test_an_installed_package_opens_the_payloads_of_its_backend(
    install: Callable[[PayloadGraph], None], tmp_path: Path, shell: Any
) -> None:
    values = {
        0: PayloadValue("fp32", (2, "?")),
        1: PayloadValue("int8", (3,), 3, "scale 2"),
        2: PayloadValue("fp32", (2,)),
    }
    nodes = (
        PayloadNode("Loop", (0, 1), (2,), "limits 0 to 1"),
        PayloadNode("Sqrt", (2,), (2,)),
    )
    # What goes in comes out, too, and the last result is made twice.
    arguments = {0: 0, 1: 2, 2: 0}
    install(PayloadGraph(nodes, values, arguments, 3, {"Add": 2}))
    found = contents_of(memoryview(b"any"), "Mine")
    assert found.lines == (
        "Loop(fp32[2, ?], int8[3] scale 2 constant of 3 B) -> fp32[2], limits 0 to 1",
        "Sqrt(fp32[2]) -> fp32[2]",
    )
    assert (found.operators, found.closed) == ({"Add": 2, "Loop": 1, "Sqrt": 1}, "")
    assert (found.links, found.results) == (((-1,), (0,)), {1: 1})
    path = written(tmp_path / "a.pte", b"any", backend="Mine")
    assert "; 2 Add, 1 Loop, 1 Sqrt; constants 3 B" in shell("inspect", path).out


@pytest.mark.parametrize(
    ("error", "backend", "told"),
    [
        (ValueError("found 3 bytes\x1b[2J"), "Mine", "ValueError: found 3 bytes"),
        (RecursionError("deep"), "Mine", "RecursionError: deep"),
        (ImportError("no such module"), "Mine", "ImportError: no such module"),
        (ValueError(), "Other", "no installed package opens payloads of Other"),
        (ValueError(), "OpenvinoBackend", "lowerdeck-openvino"),
    ],
)
def test_a_payload_that_cannot_be_opened_stays_closed_with_a_word(
    error: Exception,
    backend: str,
    told: str,
    install: Callable[[Exception], None],
    tmp_path: Path,
    shell: Any,
) -> None:
    install(error)
    path = written(tmp_path / "a.pte", b"any", backend=backend)
    text = shell("inspect", path).out
    assert f"; not opened, as {told}" in text or backend != "Mine"
    assert "\x1b" not in text
    (entry,) = json.loads(shell("inspect", path, "--json").out)["delegates"]
    assert entry["payload"] is None
    assert told in entry["closed"]


def test_lines_of_hostile_payloads_are_short(
    install: Callable[[PayloadGraph], None],
) -> None:
    values = {0: PayloadValue("fp\n32", ("1\n" * 900,), None, "x" * 9000)}
    nodes = (PayloadNode("Ad\nd" * 900, (0,), (7,)),)
    install(PayloadGraph(nodes, values, {5: 9}, 0))
    (line,) = contents_of(memoryview(b"any"), "Mine").lines
    assert "\n" not in line
    assert len(line) < 1000
    assert line.endswith(" -> ?")
    # A line lists some of a thousand inputs.
    values, many = {0: PayloadValue("fp32", (2,), None, "x" * 400)}, (0,) * 1000
    install(PayloadGraph((PayloadNode("Concat", many, many),) * 400, values, {0: 0}, 0))
    lines = contents_of(memoryview(b"any"), "Mine").lines
    assert lines[0].count("fp32[2]") == 24
    assert lines[0].endswith(", ... and 988 more")
    assert sum(map(len, lines)) < 5_000_000
