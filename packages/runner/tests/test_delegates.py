"""Delegates: found, initialised, called, refused."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, cast

import pytest
import torch

from lowerdeck.runner import ExecutionError, ProgramError, load
from lowerdeck.serializer import CompileSpec


class Doubler:
    """Returns twice its input."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[CompileSpec],
        named_data: Mapping[str, memoryview],
    ) -> bytes:
        if bytes(blob) == b"bad":
            raise ValueError("the blob is bad")
        self.seen = [
            bytes(blob),
            [(s.key, bytes(cast(memoryview, s.value))) for s in compile_specs],
            named_data,
        ]
        return bytes(blob)

    def input_count(self, handle: bytes) -> int:
        return 1

    def execute(self, handle: bytes, inputs: Sequence[Any]) -> list[Any]:
        return [value * 2 for value in inputs]


class Faulty(Doubler):
    def __init__(self, answer: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.answer = answer

    def execute(self, handle: bytes, inputs: Sequence[Any]) -> Any:
        return self.answer(inputs[0])


class Counting(Doubler):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def input_count(self, handle: bytes) -> int:
        return self.count


def doubled(m: Any, blob: bytes = b"blob") -> Any:
    x, out = m.tensor([2]), m.tensor([2])
    m.delegate("Doubler", [x, out], blob, [("key", b"value")])
    return m.ends([x], [out])


def test_a_given_runtime_gets_blob_specs_and_named_data(build: Any, method: Any) -> None:
    build.named("weights", b"1234")
    runtime = Doubler()
    program = load(doubled(method), backends={"Doubler": runtime})
    assert program.run("forward", torch.ones(2))[0].tolist() == [2.0, 2.0]
    blob, specs, named = runtime.seen
    assert (blob, specs, {k: bytes(v) for k, v in named.items()}) == (
        b"blob",
        [("key", b"value")],
        {"weights": b"1234"},
    )


def test_an_installed_runtime_is_found(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("Doubler", f"{__name__}:Doubler", "lowerdeck.runtimes")
    monkeypatch.setattr(EntryPoint, "load", lambda self: Doubler)
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda **wanted: EntryPoints([entry]).select(**wanted)
    )
    assert load(doubled(method)).run("forward", torch.ones(2))[0].tolist() == [2.0, 2.0]

    def broken(self: EntryPoint) -> Any:
        raise ImportError("no such module")

    monkeypatch.setattr(EntryPoint, "load", broken)
    with pytest.raises(ProgramError, match=r"'Doubler'.*no such module"):
        load(doubled(method)).method()


def test_a_refused_blob_is_a_program_error(method: Any) -> None:
    program = load(doubled(method, b"bad"), backends={"Doubler": Doubler()})
    with pytest.raises(ProgramError, match=r"'Doubler' rejects its delegate: .*the blob is bad"):
        program.method()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: [], "returned 0 outputs; the program expects 1"),
        (lambda x: [x.double()], "returned torch.float64"),
        (lambda x: [x[:1]], r"shape \[1\]; the program says \[2\]"),
        (lambda x: ["text"], "returned a str"),
        (lambda x: x.reshape(7), "shape '\\[7\\]' is invalid"),
    ],
)
def test_a_wrong_answer_is_an_execution_error(method: Any, answer: Any, message: str) -> None:
    program = load(doubled(method), backends={"Doubler": Faulty(answer)})
    with pytest.raises(ExecutionError, match=rf"instruction 0 \(Doubler\[0\]\).*{message}"):
        program.run("forward", torch.ones(2))


def test_a_runtime_that_counts_its_inputs_is_believed(method: Any) -> None:
    x, out = method.tensor([2]), method.tensor([2])
    method.call("aten::relu.out", x, out, out)
    method.delegate("Doubler", [x, out])
    program = method.ends([x], [out])
    forward = load(program, backends={"Doubler": Counting(1)}).method()
    assert forward.run_flat([torch.ones(2)])[0].tolist() == [2.0, 2.0]
    with pytest.raises(ProgramError, match="reports 3 inputs; the call has 2 values"):
        load(program, backends={"Doubler": Counting(3)}).method()


def test_a_delegate_may_not_write_constants(method: Any) -> None:
    x, c = method.tensor([2]), method.constant(torch.zeros(2))
    method.delegate("Doubler", [x, c])
    with pytest.raises(ProgramError, match="constant"):
        load(method.ends([x], [c]), backends={"Doubler": Counting(1)}).method()


def test_a_missing_runtime_is_told_with_what_to_do(method: Any) -> None:
    with pytest.raises(ProgramError, match=r"'Doubler' has no runtime.*backends="):
        load(doubled(method)).method()


def test_two_branches_may_write_the_same_value(method: Any) -> None:
    condition, x, out = method.tensor([], torch.bool), method.tensor([2]), method.tensor([2])
    method.jump(condition, 3)
    method.delegate("Doubler", [x, out])
    method.jump(method.boolean(False), 4)
    method.delegate("Doubler", [x, out])
    forward = load(method.ends([condition, x], [out]), backends={"Doubler": Doubler()}).method()
    for truth in (True, False):
        assert forward.run_flat([torch.tensor(truth), torch.ones(2)])[0].tolist() == [2.0, 2.0]


def test_dynamic_outputs_and_moved_values(method: Any) -> None:
    x, out = method.tensor([4], dynamic=True), method.tensor([4], dynamic=True)
    moved = method.tensor([4], dynamic=True, planned=False)
    method.move(x, moved)
    method.delegate("Doubler", [moved, out])
    forward = load(method.ends([x], [out]), backends={"Doubler": Doubler()}).method()
    for size in (3, 1, 4):
        assert forward.run_flat([torch.ones(size)])[0].tolist() == [2.0] * size


def test_a_runtime_without_its_number_of_inputs_is_refused(method: Any) -> None:
    class Incomplete:
        init = Doubler.init
        execute = Doubler.execute

    runtime: Any = Incomplete()
    with pytest.raises(ProgramError, match=r"'Doubler' \(Incomplete\) has no input_count: add it"):
        load(doubled(method), backends={"Doubler": runtime}).method()
