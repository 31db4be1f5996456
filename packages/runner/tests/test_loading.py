"""Programs from paths, bytes and memory; external data; files that are refused."""

import gc
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
    with pytest.raises(ProgramError, match="ends before byte 20"):
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


def test_a_key_in_both_files_is_refused(build: Any, method: Any) -> None:
    build.named("w", b"other")
    x, out = method.tensor([2]), method.tensor([2])
    method.delegate("Any", [x, out])
    with pytest.raises(ProgramError, match="both the program and the external data hold 'w'"):
        load(method.ends([x], [out]), data=ptd(GOOD)).method()


def test_a_file_that_the_verifier_refuses_is_refused(method: Any) -> None:
    x = method.tensor([2])
    method.jump(method.boolean(False), 99)
    content = serialize_pte(method.ends([x], [x]))
    with pytest.raises(ProgramError, match="the program cannot be used: "):
        load(content)


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


def test_unknown_methods_and_memory_modes_are_refused(method: Any) -> None:
    program = method.ends([], [])
    with pytest.raises(ProgramError, match="no method 'other'; the program has forward"):
        load(program).method("other")
    with pytest.raises(ValueError, match="memory is 'loose'"):
        load(program, memory="loose")  # type: ignore[arg-type]


def test_two_methods_of_one_name_are_refused(build: Any) -> None:
    build.method()
    build.method()
    with pytest.raises(ProgramError, match="the same name"):
        load(build.program)


def test_loading_leaves_the_garbage_collector_as_it_was(method: Any) -> None:
    program = method.ends([], [])
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            load(program).method()
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


def test_what_is_no_program_is_refused_with_what_to_give() -> None:
    class Emitted:
        def to_bytes(self) -> bytes:
            return b""

    with pytest.raises(ProgramError, match=r"found a Emitted.*give its \.to_bytes\(\)"):
        load(Emitted())  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match="found a NoneType"):
        load(None)  # type: ignore[arg-type]


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are notes")
    with pytest.raises(ProgramError, match=r"notes\.txt cannot be used: file identifier"):
        load(path)


def test_wrong_backends_and_debug_maps_are_refused(method: Any) -> None:
    program = method.ends([], [])
    with pytest.raises(ProgramError, match="found a list as backends"):
        load(program, backends=[])  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match=r"found the class Path .*give Path\(\)"):
        load(program, backends={"B": Path})  # type: ignore[dict-item]
    with pytest.raises(ProgramError, match="found a str as debug"):
        load(program, debug="x")  # type: ignore[arg-type]


def test_inputs_without_the_name_of_the_method_are_refused_briefly(method: Any) -> None:
    program = load(method.ends([], []))
    assert repr(program) == "<LoadedProgram forward>"
    with pytest.raises(ProgramError, match="found a Tensor as the name of a method"):
        program.run(torch.zeros(1000))  # type: ignore[arg-type]
