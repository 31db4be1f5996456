"""Programs from paths, bytes and memory; external data; files that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lowerdeck.runner import ProgramError, load
from lowerdeck.serializer import (
    ExternalData,
    ExternalEntry,
    FileRange,
    Hazard,
    Program,
    ScalarType,
    TensorDataLocation,
    TensorLayout,
    serialize_ptd,
    serialize_pte,
    verify_pte,
)

WEIGHT = torch.tensor([3.0, 4.0])
RAW = WEIGHT.numpy().tobytes()


def external(m: Any, *, planned: bool = False) -> Any:
    """Return a method that adds an external tensor to its input."""
    x, out = m.tensor([2]), m.tensor([2])
    weight = m.tensor([2], planned=planned, name="w")
    m.plan.values[weight].val.extra_tensor_info.location = TensorDataLocation.EXTERNAL
    m.call("aten::add.out", x, weight, m.integer(1), out, out)
    return m.ends([x], [out])


def ptd(layout: TensorLayout | None) -> bytes:
    return serialize_ptd(ExternalData({"w": ExternalEntry(RAW, layout)}))


GOOD = TensorLayout(ScalarType.FLOAT, [2], [0])


def test_a_program_is_read_from_a_path_bytes_a_view_or_memory(method: Any, tmp_path: Path) -> None:
    x, out = method.tensor([2]), method.tensor([2])
    constant = method.constant(WEIGHT)
    method.call("aten::add.out", x, constant, method.integer(1), out, out)
    program = method.ends([x], [out])
    content = serialize_pte(program)
    path = tmp_path / "model.pte"
    path.write_bytes(content)
    for source in (path, str(path), content, bytearray(content), memoryview(content), program):
        assert load(source).run("forward", torch.ones(2))[0].tolist() == [4.0, 5.0]


def test_constants_are_the_bytes_of_the_file_themselves(method: Any) -> None:
    constant = method.constant(WEIGHT)
    content = bytearray(serialize_pte(method.ends([], [constant])))
    forward = load(content).method()
    first = torch.frombuffer(content, dtype=torch.uint8).data_ptr()
    register: Any = forward._frame.registers[constant]
    assert first <= register.data_ptr() < first + len(content)


def test_constants_may_be_a_range_of_another_file(method: Any, tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"12345678" + RAW)
    constant = method.constant(WEIGHT)
    program = method.ends([], [constant])
    program.constant_buffer[1].storage = FileRange(path, 8, 8)
    assert load(program).run("forward")[0].tolist() == [3.0, 4.0]
    program.constant_buffer[1].storage = FileRange(path, 12, 8)
    with pytest.raises(ProgramError, match="holds only 16 bytes"):
        load(program).run("forward")


@pytest.mark.parametrize("planned", [False, True])
def test_external_tensors_come_from_a_ptd(method: Any, tmp_path: Path, planned: bool) -> None:
    program = external(method, planned=planned)
    path = tmp_path / "model.ptd"
    path.write_bytes(ptd(GOOD))
    for data in (path, ptd(GOOD), {"w": RAW}):
        assert load(program, data=data).run("forward", torch.ones(2))[0].tolist() == [4.0, 5.0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "no external data given: pass the .ptd"),
        ({"v": RAW}, "1 other tensors given"),
        ({"w": RAW[:4]}, "needs 8 bytes; the file has 4"),
        (ptd(None), "as a blob, not as a tensor"),
        (ptd(TensorLayout(ScalarType.INT, [2], [0])), "is torch.int32 of shape"),
        (ptd(TensorLayout(ScalarType.FLOAT, [1, 2], [0, 1])), r"shape \[1, 2\]"),
        (ptd(GOOD)[:60], "the external data cannot be used"),
    ],
)
def test_external_tensors_that_do_not_fit_are_refused(
    method: Any, data: Any, message: str
) -> None:
    program = external(method)
    with pytest.raises(ProgramError, match=message):
        load(program, data=data).method()


def test_a_file_that_needs_a_newer_runtime_is_marked(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(data: bytes, *, on_hazard: Any) -> Program:
        on_hazard(Hazard("needs ExecuTorch 1.5 or later", "delegate", 0, release="1.5"))
        on_hazard(Hazard("divides by 0", "instruction", 0))
        return verify_pte(data)

    monkeypatch.setattr("lowerdeck.runner.loading.verify_pte", verify)
    content = serialize_pte(method.ends([x := method.tensor([2])], [x]))
    with pytest.warns(UserWarning, match="the program needs ExecuTorch 1.5") as warned:
        load(content)
    assert [Path(one.filename).name for one in warned] == ["test_loading.py"]


def _with_name_twice(build: Any) -> Any:
    build.method()
    build.method()
    return build.program


def _jumping_nowhere(build: Any) -> bytes:
    m = build.method()
    m.jump(m.boolean(False), 99)
    return serialize_pte(m.ends([], []))


def _named_twice(build: Any) -> Any:
    build.named("w", b"other")
    m = build.method()
    x, out = m.tensor([2]), m.tensor([2])
    m.delegate("Any", [x, out])
    return m.ends([x], [out])


def _empty(build: Any) -> Any:
    return build.method().ends([], [])


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda build: None, {}, "found a NoneType"),
        (lambda build: b"these are notes", {}, "is not a .pte file: file identifier"),
        (_with_name_twice, {}, "the same name"),
        (_jumping_nowhere, {}, "the program cannot be used: "),
        (_named_twice, {"data": ptd(GOOD)}, "both the program and the external data contain 'w'"),
        (_empty, {"memory": "loose"}, "memory is 'loose'"),
        (_empty, {"method": "other"}, "no method 'other'; the program has forward"),
    ],
)
def test_what_cannot_be_loaded_is_refused(
    build: Any, make: Any, options: dict[str, Any], message: str
) -> None:
    method = options.get("method", "forward")
    options = {name: value for name, value in options.items() if name != "method"}
    with pytest.raises((ProgramError, ValueError), match=message):
        load(make(build), **options).method(method)
