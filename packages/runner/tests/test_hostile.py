"""Damaged programs: whatever is wrong, the error is one of this package's."""

import dataclasses
import enum
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowerdeck.runner import ExecutionError, ProgramError, RunnerError, load
from lowerdeck.serializer import Program, Tensor, deserialize_pte, serialize_pte

pytestmark = pytest.mark.filterwarnings("ignore:.*out:UserWarning")

INPUTS = [torch.tensor(True), torch.ones(3, 2), torch.ones(1, 3, 4, 4)]


def varied(build: Any) -> Program:
    """Return a program with a bit of everything."""
    m = build.method()
    condition = m.tensor([], torch.bool)
    x, image = m.tensor([4, 2], dynamic=True), m.tensor([1, 3, 4, 4])
    doubled, moved = m.tensor([4, 2], dynamic=True), m.tensor([4, 2], planned=False, dynamic=True)
    viewed = m.tensor([8], dynamic=True, planned=False)
    state = m.tensor([2], initial=torch.ones(2), memory_id=2)
    parts = [m.tensor([4, 1], dynamic=True), m.tensor([4, 1], dynamic=True)]
    listed = m.tensors(parts)
    picked = m.tensor([2, 2])
    pooled, positions = m.tensor([1, 3, 2, 2]), m.tensor([1, 3, 2, 2], torch.int64)
    both = m.tensors([pooled, positions])
    weight = m.constant(torch.ones(3))
    norm, save, other = m.tensor([1, 3, 4, 4]), m.tensor([0]), m.tensor([0])
    three = m.tensors([norm, save, other])
    size, done, zero, one, two = m.integer(0), m.boolean(False), *map(m.integer, (0, 1, 2))
    false = m.boolean(False)
    m.call("aten::add.out", x, x, one, doubled, doubled)
    m.jump(condition, 4)
    m.move(doubled, moved)
    m.jump(false, 5)
    m.move(x, moved)
    m.call("executorch_prim::et_view.default", moved, m.ints([-1]), viewed)
    m.call("aten::sym_size.int", x, zero, size)
    m.call("executorch_prim::mul.Scalar", size, two, size)
    m.call("executorch_prim::ge.Scalar", size, two, done)
    m.jump(done, 0)
    m.call("aten::split_with_sizes_copy.out", x, m.ints([1, 1]), one, listed, listed)
    rows = m.optional_tensors([m.constant(torch.tensor([0, 1])), -1])
    m.call("aten::index.Tensor_out", x, rows, picked, picked)
    pool = (m.ints([2, 2]), m.ints([2, 2]), m.ints([0, 0]), m.ints([1, 1]), false)
    m.call("aten::max_pool2d_with_indices.out", image, *pool, pooled, positions, both)
    stats = (weight, weight, weight, weight, m.double(0.1), m.double(1e-5))
    batch_norm = "aten::_native_batch_norm_legit_no_training.out"
    m.call(batch_norm, image, *stats, norm, save, other, three)
    m.call("aten::add.out", state, weight_row(m), one, state, state)
    return build_ends(
        m, [condition, x, image], [viewed, *parts, picked, pooled, norm, state, size]
    )


def weight_row(m: Any) -> int:
    return int(m.constant(torch.tensor([1.0, 2.0])))


def build_ends(m: Any, inputs: list[int], outputs: list[int]) -> Program:
    program: Program = m.ends(inputs, outputs)
    return program


def positions(item: Any) -> list[tuple[Any, Any]]:
    """Return where the numbers of a program are: (object, field or index)."""
    found: list[tuple[Any, Any]] = []
    pairs: list[tuple[Any, Any]] = []
    if isinstance(item, list):
        pairs = list(enumerate(item))
    elif dataclasses.is_dataclass(item):
        pairs = [(f.name, getattr(item, f.name)) for f in dataclasses.fields(item)]
    for position, value in pairs:
        if isinstance(value, (int, float)):
            found.append((item, position))
        else:
            found += positions(value)
    return found


def changed(value: Any, data: st.DataObject) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, enum.IntEnum):
        return data.draw(st.sampled_from(type(value)))
    if isinstance(value, float):
        return data.draw(st.floats())
    near = st.sampled_from([value - 1, value + 1, value * 2, -1, 0, 1, 2**20, 2**31 - 1, 2**62])
    return data.draw(near | st.integers(0, 60))


def attempt(program: Any, memory: Any) -> str:
    try:
        load(program, memory=memory).method().run_flat(INPUTS)
    except RunnerError as error:
        return type(error).__name__
    return "ran"


@pytest.mark.parametrize("memory", ["strict", "poison"])
def test_the_undamaged_program_runs(build: Any, memory: Any) -> None:
    program = varied(build)
    image = torch.randn(1, 3, 4, 4)
    one = torch.ones(3)
    for rows, doubles in ((3, True), (4, False)):
        x = torch.randn(rows, 2)
        method = load(serialize_pte(program), memory=memory).method()
        results = method.run_flat([torch.tensor(doubles), x, image])
        wanted = [
            *((x + x if doubles else x).flatten(), x[:, :1], x[:, 1:], x[:2]),
            torch.nn.functional.max_pool2d(image, 2),
            torch.nn.functional.batch_norm(image, one, one, one, one),
            torch.tensor([2.0, 3.0]),
        ]
        for found, expected in zip(results, wanted, strict=False):
            torch.testing.assert_close(found, expected)
        assert results[len(wanted) :] == [2 * rows]


def damaged(program: Program, data: st.DataObject) -> Program:
    """Change numbers of a program."""
    found = positions(program.execution_plan)
    for _ in range(data.draw(st.integers(1, 3))):
        item, position = data.draw(st.sampled_from(found))
        if isinstance(item, list):
            item[position] = changed(item[position], data)
        else:
            setattr(item, position, changed(getattr(item, position), data))
    return program


def damaged_file(program: Program, data: st.DataObject) -> bytes:
    """Change words of a file."""
    content = bytearray(serialize_pte(program))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content) - 4)) & ~3
        word = int.from_bytes(content[start : start + 4], "little")
        new = changed(word, data) & 0xFFFFFFFF
        content[start : start + 4] = new.to_bytes(4, "little")
    return bytes(content)


@pytest.mark.parametrize("examples", [60, pytest.param(5000, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("damage", [damaged, damaged_file])
def test_what_is_damaged_gives_typed_errors(
    build: Any, monkeypatch: pytest.MonkeyPatch, damage: Any, examples: int
) -> None:
    monkeypatch.setattr("lowerdeck.runner.method.MAX_INSTRUCTIONS", 500)
    monkeypatch.setattr("lowerdeck.runner.values.arena.MAX_BYTES", 2**24)

    @given(st.data())
    @settings(max_examples=examples, deadline=None)
    def tried(data: st.DataObject) -> None:
        program = damage(varied(type(build)()), data)
        attempt(program, data.draw(st.sampled_from(["strict", "poison"])))

    tried()


def test_a_truncated_file_is_refused(build: Any) -> None:
    content = serialize_pte(varied(build))
    for length in (0, 3, 8, 64, len(content) // 2, len(content) - 1):
        with pytest.raises(ProgramError):
            load(content[:length])


def test_kernels_that_trust_their_arguments_are_guarded(build: Any) -> None:
    program = varied(build)
    for value in program.execution_plan[0].values:
        if isinstance(value.val, Tensor) and value.val.sizes == [3]:
            value.val.sizes = [1]
    with pytest.raises(ExecutionError, match="one element for each of 3 channels"):
        load(program).method().run_flat(INPUTS)


def test_a_failed_call_leaves_the_method_usable(method: Any) -> None:
    x, index, out = method.tensor([2, 2]), method.tensor([1], torch.int64), method.tensor([1, 2])
    rows = method.optional_tensors([index])
    method.call("aten::index.Tensor_out", x, rows, out, out)
    forward = load(method.ends([x, index], [out])).method()
    with pytest.raises(ExecutionError, match="IndexError"):
        forward.run_flat([torch.ones(2, 2), torch.tensor([7])])
    assert forward.run_flat([torch.ones(2, 2), torch.tensor([1])])[0].tolist() == [[1.0, 1.0]]


def test_what_was_written_and_read_again_still_runs(build: Any) -> None:
    assert attempt(deserialize_pte(serialize_pte(varied(build))), "poison") == "ran"
