"""What is inside an XNNPACK delegate is told by every command, whoever compiled it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serializer_payloads import (  # type: ignore[import-not-found]
    convolution,
    graph,
    linear,
    node,
    payload,
    relu,
    value,
)

from lowerdeck.serializer import (
    BackendDelegate,
    BackendDelegateDataReference,
    BackendDelegateInlineData,
    DataLocation,
    ExecutionPlan,
    Program,
    XnnOperator,
    serialize_pte,
)
from lowerdeck.serializer.command_line import main
from lowerdeck.serializer.report.operators import contents_of


def written(path: Path, *blobs: bytes) -> str:
    """Write a program with delegates, and return its path."""
    plan = ExecutionPlan("forward")
    plan.delegates = [
        BackendDelegate(
            "XnnpackBackend", BackendDelegateDataReference(DataLocation.INLINE, number), []
        )
        for number in range(len(blobs))
    ]
    data = [BackendDelegateInlineData(blob) for blob in blobs]
    path.write_bytes(serialize_pte(Program(execution_plan=[plan], backend_delegate_data=data)))
    return str(path)


def test_inspect_tells_operators_types_scales_and_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "a.pte", payload(convolution(), bytes(64)), payload(linear()), b"x")
    assert main(["inspect", path]) == 0
    text = capsys.readouterr().out
    assert "; 1 Conv2d; constants 62 B" in text
    assert "; 1 Convert, 1 FullyConnected; constants 72 B" in text
    assert main(["inspect", path, "--json"]) == 0
    first, second, third = json.loads(capsys.readouterr().out)["delegates"]
    assert first["payload"]["operators"] == {"Conv2d": 1}
    assert first["payload"]["constant_bytes"] == 54 + 8
    (line,) = first["payload"]["nodes"]
    assert line.startswith("Conv2d(qint8[1, 4, 4, 3] scale 0.5 zero -3, qcint8[2, 3, 3, 3]")
    assert "scales found at run time" in second["payload"]["nodes"][1]
    assert "scales for each 32 constant of 64 B" in second["payload"]["nodes"][1]
    assert third["payload"] is None


def test_diff_tells_which_operators_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = written(tmp_path / "old.pte", payload(relu()))
    new = written(tmp_path / "new.pte", payload(convolution(), bytes(64)))
    assert main(["diff", old, new]) == 1
    lines = capsys.readouterr().out.splitlines()
    told = "method forward: delegate 0:"
    assert f"{told} - Clamp(fp32[2, 3]) -> fp32[2, 3], limits 0 to 1" in lines
    assert sum(line.startswith(f"{told} + Conv2d(qint8") for line in lines) == 1
    assert main(["diff", old, old]) == 0


def test_many_nodes_are_cut_and_counted() -> None:
    nodes = [node(XnnOperator.ABS, input_id=0, output_id=0) for _ in range(500)]
    found = contents_of(memoryview(payload(graph([value(0)], nodes))))
    assert found is not None
    assert (len(found.lines), found.left_out, found.operators) == (400, 100, {"Abs": 500})


def test_the_operators_of_a_payload_are_linked_to_each_other_and_to_its_arguments() -> None:
    values = [value(0, external_id=0), value(1, external_id=1), value(2), value(3, external_id=2)]
    nodes = [
        node(XnnOperator.ABS, input_id=1, output_id=2),
        node(XnnOperator.ADD, input1_id=2, input2_id=0, output_id=3),
        # It reads what it makes itself: a broken payload must not lead in circles.
        node(XnnOperator.ADD, input1_id=7, input2_id=3, output_id=7),
    ]
    found = contents_of(memoryview(payload(graph(values, nodes))))
    assert found is not None
    assert (found.links, found.results) == (((-2,), (0, -1), (1,)), {2: 1})
