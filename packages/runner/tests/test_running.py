"""Results of programs: kernels, scalars, jumps, lists, dynamic shapes and state."""

from typing import Any

import pytest
import torch

from lowerdeck.runner import ExecutionError, InputError, ProgramError, load


def add(m: Any, left: int, right: int, out: int) -> None:
    m.call("aten::add.out", left, right, m.integer(1), out, out)


def test_results_are_copies_that_later_calls_leave_alone(method: Any) -> None:
    x, out = method.tensor([1]), method.tensor([1])
    add(method, x, x, out)
    forward = load(method.ends([x], [out])).method()
    first = forward.run_flat([torch.ones(1)])[0]
    forward.run_flat([torch.zeros(1)])
    assert first.item() == 2.0


def test_a_program_that_writes_a_constant_is_refused(build: Any) -> None:
    m = build.method("itself")
    x, c = m.tensor([2]), m.constant(torch.zeros(2))
    add(m, x, x, c)
    m.ends([x], [c])
    m = build.method("view")
    x, view, c = m.tensor([2]), m.tensor([2], planned=False), m.constant(torch.zeros(2))
    m.call("executorch_prim::et_view.default", c, m.ints([2]), view)
    add(m, x, x, view)
    m.ends([x], [view])
    m = build.method("move")
    x, target, c = m.tensor([2]), m.tensor([2]), m.constant(torch.zeros(2))
    m.move(c, target)
    add(m, x, x, target)
    program = load(m.ends([x], [target]))
    for name in ("itself", "view", "move"):
        with pytest.raises(ProgramError, match="a constant or an alias of one"):
            program.method(name)


def test_dynamic_results_take_the_shape_of_each_call(method: Any) -> None:
    x, out = method.tensor([4, 2], dynamic=True), method.tensor([4, 2], dynamic=True)
    add(method, x, x, out)
    forward = load(method.ends([x], [out])).method()
    for rows in (3, 1, 0, 4):
        value = torch.randn(rows, 2)
        assert torch.equal(forward.run_flat([value])[0], value + value)


def test_a_result_beyond_its_bound_is_an_error(method: Any) -> None:
    x, out = method.tensor([4]), method.tensor([2], dynamic=True)
    add(method, x, x, out)
    with pytest.raises(
        ExecutionError,
        match=r"instruction 0 \(aten::add.out\).*memory for 2 elements in 1 dimensions",
    ):
        load(method.ends([x], [out])).run("forward", torch.zeros(4))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_static_result_of_another_shape_is_an_error(method: Any) -> None:
    x, out = method.tensor([4]), method.tensor([2])
    add(method, x, x, out)
    with pytest.raises(ExecutionError, match=r"shape \[4\]; the program says \[2\]"):
        load(method.ends([x], [out])).run("forward", torch.zeros(4))


def test_channels_last_results_keep_the_layout_of_the_file(method: Any) -> None:
    order = [0, 2, 3, 1]
    x = method.tensor([1, 3, 4, 4], dim_order=order)
    out = method.tensor([2, 3, 4, 4], dim_order=order, dynamic=True)
    add(method, x, x, out)
    value = torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last)
    (result,) = load(method.ends([x], [out])).method().run_flat([value])
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(result, value + value)


def test_a_loop_counts_and_copies_rows(method: Any) -> None:
    x, row = method.tensor([4, 2], dynamic=True), method.tensor([2])
    out = method.tensor([4, 2], dynamic=True)
    index, size, done = method.integer(0), method.integer(0), method.boolean(False)
    zero = method.integer(0)
    method.call("executorch_prim::add.Scalar", zero, zero, index)
    method.call("aten::sym_size.int", x, zero, size)
    head = method.call("aten::select_copy.int_out", x, zero, index, row, row)
    add(method, row, row, row)
    method.call("executorch_prim::et_copy_index.tensor", out, row, index)
    method.call("executorch_prim::add.Scalar", index, method.integer(1), index)
    method.call("executorch_prim::eq.Scalar", index, size, done)
    method.jump(done, head)
    forward = load(method.ends([x], [out])).method()
    for rows in (3, 1, 4):
        value = torch.randn(rows, 2)
        assert torch.equal(forward.run_flat([value])[0], value * 2)


def test_an_endless_loop_ends_in_an_error(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowerdeck.runner.method.MAX_INSTRUCTIONS", 1000)
    method.jump(method.boolean(False), 0)
    with pytest.raises(ExecutionError, match="endless loop"):
        load(method.ends([], [])).run("forward")


def test_methods_without_code_return_their_constants(build: Any) -> None:
    for name, maker, value in (
        ("an_int", "integer", 7),
        ("a_double", "double", float("inf")),
        ("a_bool", "boolean", True),
        ("a_string", "string", "text"),
    ):
        m = build.method(name)
        m.ends([], [getattr(m, maker)(value)])
    m = build.method("a_null")
    program = load(m.ends([], [m.null()]))
    assert program.methods == ["an_int", "a_double", "a_bool", "a_string", "a_null"]
    found = [program.method(name).run_flat([]) for name in program.methods]
    assert found == [[7], [float("inf")], [True], ["text"], [None]]


def test_unknown_operators_are_all_named_when_the_method_is_loaded(method: Any) -> None:
    x = method.tensor([1])
    method.call("aten::no_such.out", x, x)
    method.call("their::op.out", x, x)
    with pytest.raises(ProgramError, match=r"aten::no_such.out, their::op.out"):
        load(method.ends([x], [x])).method()


def test_wrong_arity_and_kinds_are_refused_when_the_method_is_loaded(build: Any) -> None:
    m = build.method("arity")
    x = m.tensor([1])
    m.call("aten::relu.out", x, x)
    m.ends([x], [x])
    m = build.method("kind")
    x = m.tensor([1])
    m.call("aten::relu.out", m.string("x"), x, x)
    program = load(m.ends([x], [x]))
    with pytest.raises(ProgramError, match="called with 2 values; it takes 3"):
        program.method("arity")
    with pytest.raises(ProgramError, match="a String; expected Tensor"):
        program.method("kind")


def test_wrong_inputs_name_the_argument(method: Any) -> None:
    x, flag = method.tensor([2, 3], dynamic=True), method.integer(5)
    forward = load(method.ends([x, flag], [x])).method()
    good = torch.zeros(2, 3)
    for inputs, message in (
        ([good], "1 inputs given; the method takes 2"),
        ([good.int(), 5], r"inputs\[0\] is torch.int32; expected torch.float32"),
        ([torch.zeros(3, 3), 5], r"inputs\[0\] has shape \[3, 3\]; expected at most \[2, 3\]"),
        ([torch.zeros(3), 5], r"inputs\[0\] has shape \[3\]"),
        ([torch.zeros(3, 2).t(), 5], r"inputs\[0\] has strides .*contiguous\(\)"),
        ([None, 5], r"inputs\[0\] is a NoneType; expected a tensor"),
        ([good, 6], r"inputs\[1\] is 6; the program is specialized to 5"),
        ([good, True], r"inputs\[1\] is True"),
        ([good.to("meta"), 5], r"inputs\[0\] .*meta"),
        ([good.to_sparse(), 5], r"inputs\[0\] .*sparse"),
    ):
        with pytest.raises(InputError, match=message):
            forward.run_flat(inputs)


def test_a_list_of_sizes_may_hold_computed_ones(method: Any) -> None:
    x, out = method.tensor([4], dynamic=True), method.tensor([4], dynamic=True)
    size = method.integer(-1)
    method.call("aten::sym_size.int", x, method.integer(0), size)
    from_list = method.ints([0])
    method.plan.values[from_list].val.items[0] = size
    method.call("aten::full.out", from_list, method.double(0.5), out, out)
    forward = load(method.ends([x], [out])).method()
    assert forward.run_flat([torch.zeros(3)])[0].tolist() == [0.5] * 3
    assert forward.run_flat([torch.zeros(1)])[0].tolist() == [0.5]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("mod.Scalar", (-7, 2), -1),
        ("mod.Scalar", (7, -2), 1),
        ("floordiv.Scalar", (-7, 2), -4),
        ("floordiv.int", (-7, 2), -3),
        ("floordiv.int", (-7, -2), 3),
        ("sym_max.Scalar", (1, 2), 2),
        ("mul.Scalar", (2**62, 2), "does not fit in int64"),
    ],
)
def test_scalars_are_those_of_the_runtime(
    method: Any, name: str, values: tuple[int, int], expected: Any
) -> None:
    result = method.integer(0)
    method.call(f"executorch_prim::{name}", *map(method.integer, values), result)
    program = load(method.ends([], [result]))
    if isinstance(expected, str):
        with pytest.raises(ExecutionError, match=expected):
            program.run("forward")
    else:
        assert program.run("forward") == [expected]
