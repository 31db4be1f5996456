"""Several threads: one call at a time into a program, and clones that share only constants."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lowerdeck.runner import BusyError, ExecutionError, compare, load
from lowerdeck_zoo import Of


def doubling(m: Any) -> Any:
    """Return a program with a constant: ((x + x) + w) * w, with w = 3."""
    x, y, out = (m.tensor([64]) for _ in range(3))
    weight, one = m.constant(torch.full((64,), 3.0)), m.integer(1)
    m.call("aten::add.out", x, x, one, y, y)
    m.call("aten::add.out", y, weight, one, y, y)
    m.call("aten::mul.out", y, weight, out, out)
    return m.ends([x], [out])


def counting(m: Any) -> Any:
    """Return a program that adds its input to its state and returns the state."""
    total, x = m.tensor([1], name="total", initial=torch.zeros(1), memory_id=2), m.tensor([1])
    m.call("aten::add.out", total, x, m.integer(1), total, total)
    return m.ends([x], [total])


class Waiting:
    """Runs what it is given while the method around it runs."""

    def __init__(self) -> None:
        self.inside: Callable[[], object] = lambda: None

    def init(self, blob: object, compile_specs: object, named_data: object) -> None:
        return None

    def input_count(self, handle: None) -> int:
        return 1

    def execute(self, handle: None, inputs: Sequence[Any]) -> list[torch.Tensor]:
        self.inside()
        return [inputs[0] + 1]


def delegated(build: Any) -> tuple[Any, Waiting]:
    for name in ("forward", "other"):
        m = build.method(name)
        x, out = m.tensor([1]), m.tensor([1])
        m.delegate("Waiting", [x, out])
        m.ends([x], [out])
    runtime = Waiting()
    return load(build.program, backends={"Waiting": runtime}), runtime


ASKED: dict[str, Callable[[Any], object]] = {
    "a call": lambda program: program.run("forward", torch.ones(1)),
    "a flat call": lambda program: program.method().run_flat([torch.ones(1)]),
    "a profile": lambda program: program.run("forward", torch.ones(1), profile=True),
    "another method": lambda program: program.run("other", torch.ones(1)),
    "loading a method": lambda program: program.method("other"),
    "a reset": lambda program: program.reset(),
    "a comparison": lambda program: compare(program, Of(lambda x: x + 1), (torch.ones(1),)),
}


@pytest.mark.parametrize("asked", ASKED)
def test_whatever_another_thread_asks_for_meanwhile_is_refused(build: Any, asked: str) -> None:
    program, runtime = delegated(build)
    running, done = threading.Event(), threading.Event()

    def wait() -> None:
        running.set()
        assert done.wait(60)

    runtime.inside = wait
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(program.run, "forward", torch.ones(1))
        try:
            assert running.wait(60)
            with pytest.raises(BusyError, match=r"clone\(\)"):
                ASKED[asked](program)
        finally:
            done.set()
        assert first.result(60)[0].tolist() == [2.0]
    runtime.inside = lambda: None
    ASKED[asked](program)
    assert program.run("other", torch.ones(1))[0].tolist() == [2.0]


def test_a_delegate_cannot_call_its_own_program(build: Any) -> None:
    program, runtime = delegated(build)
    runtime.inside = lambda: program.run("forward", torch.ones(1))
    with pytest.raises(
        ExecutionError, match="in progress, in another thread or as a caller of this"
    ):
        program.run("forward", torch.ones(1))
    runtime.inside = lambda: None
    assert program.run("forward", torch.ones(1))[0].tolist() == [2.0]


def test_a_delegate_can_call_a_clone(build: Any) -> None:
    program, runtime = delegated(build)
    deeper = [program.clone()]
    runtime.inside = lambda: deeper.pop().run("forward", torch.ones(1)) if deeper else None
    assert program.run("forward", torch.ones(1))[0].tolist() == [2.0]
    assert not deeper


def test_clones_share_constants_and_not_state(build: Any) -> None:
    doubling(build.method("double"))
    program = load(counting(build.method("count")))
    for _ in range(3):
        program.run("count", torch.ones(1))
    other = program.clone()
    assert other.run("count", torch.ones(1))[0].tolist() == [1.0]
    assert program.run("count", torch.ones(1))[0].tolist() == [4.0]
    other.reset()
    assert program.run("count", torch.zeros(1))[0].tolist() == [4.0]
    addresses = []
    for loaded in (program, other):
        frame: Any = loaded.method("double")._frame
        constant = next(
            s.index
            for s in frame.specs
            if s is not None and s.capacity == 64 and s.origin.value == "constant"
        )
        addresses.append(frame.registers[constant].data_ptr())
    assert addresses[0] == addresses[1]
