"""Memory plans: state shared between methods, overlaps found, dead memory poisoned."""

from typing import Any

import pytest
import torch

from lowerdeck.runner import MemoryPlanError, ProgramError, load


def relu(m: Any, x: int, out: int) -> int:
    return int(m.call("aten::relu.out", x, out, out))


def add(m: Any, left: int, right: int, out: int) -> None:
    m.call("aten::add.out", left, right, m.integer(1), out, out)


def test_a_write_onto_a_value_that_is_needed_later_is_refused(method: Any) -> None:
    x, kept, other, out = (method.tensor([4], at=at) for at in (0, 16, 20, 64))
    relu(method, x, kept)
    relu(method, x, other)
    add(method, kept, other, out)
    program = method.ends([x], [out])
    load(program, memory="unchecked").run("forward", torch.ones(4))
    for memory in ("strict", "poison"):
        with pytest.raises(MemoryPlanError, match="writes value 2 onto value 1") as caught:
            load(program, memory=memory).method()
        assert (caught.value.instruction, caught.value.operator) == (1, "aten::relu.out")


def test_inputs_on_one_another_are_refused_if_both_are_read(build: Any) -> None:
    for name, read in (("both", (0, 1)), ("second", (1, 1))):
        m = build.method(name)
        given = [m.tensor([4], at=0), m.tensor([4], at=8)]
        out = m.tensor([4], at=32)
        add(m, given[read[0]], given[read[1]], out)
        m.ends(given, [out])
    program = load(build.program)
    with pytest.raises(MemoryPlanError, match="writes value 1 onto value 0"):
        program.method("both")
    assert program.run("second", torch.ones(4), torch.ones(4))[0].tolist() == [2.0] * 4


def test_results_of_one_instruction_on_one_another_are_refused(method: Any) -> None:
    x, most, at = (
        method.tensor([2, 3], at=0),
        method.tensor([2], at=32),
        method.tensor([2], torch.int64, at=32),
    )
    method.call(
        "aten::max.dim_max", x, method.integer(1), method.boolean(False), most, at, method.null()
    )
    with pytest.raises(MemoryPlanError, match="onto the same bytes"):
        load(method.ends([x], [most])).method()


def test_state_that_is_overwritten_between_calls_is_refused(method: Any) -> None:
    state = method.tensor([4], at=0, initial=torch.ones(4))
    x, out, spoiler = (method.tensor([4], at=at) for at in (16, 32, 8))
    add(method, state, x, out)
    relu(method, out, spoiler)
    relu(method, spoiler, out)
    with pytest.raises(MemoryPlanError, match=f"writes value {spoiler} onto value {state}"):
        load(method.ends([x], [out])).method()


def test_state_without_a_name_that_is_overwritten_between_calls_is_refused(method: Any) -> None:
    x, total, out, spoiler = (method.tensor([4], at=at) for at in (24, 0, 40, 8))
    add(method, x, total, out)
    method.call("aten::copy_", total, out, method.boolean(False), total)
    relu(method, x, spoiler)
    relu(method, spoiler, out)
    with pytest.raises(MemoryPlanError, match=f"writes value {spoiler} onto value {total}"):
        load(method.ends([x], [out])).method()


def test_bytes_that_nothing_writes_are_not_read(method: Any) -> None:
    x, unwritten, out = (method.tensor([4], at=at) for at in (0, 16, 32))
    add(method, x, unwritten, out)
    with pytest.raises(MemoryPlanError, match="which is never written"):
        load(method.ends([x], [out])).method()


def test_a_name_for_numbers_of_another_width_is_refused(method: Any) -> None:
    x, first, out = (method.tensor([4], at=at) for at in (0, 16, 32))
    wide = method.tensor([2], at=16, dtype=torch.int64)
    relu(method, x, first)
    add(method, first, wide, out)
    with pytest.raises(MemoryPlanError, match=f"reads value {wide}, which is never written"):
        load(method.ends([x], [out])).method()


@pytest.mark.parametrize("kind", ["carry", "move", "rows"])
def test_results_of_loops_that_nothing_reads_are_no_lost_names(method: Any, kind: str) -> None:
    m = method
    done, x, y = m.tensor([], torch.bool, at=96), m.tensor([4], at=0), m.tensor([4], at=16)
    view, unread, out = m.tensor([2, 2], at=16), m.tensor([4], at=32), m.tensor([2, 2], at=64)
    relu(m, x, y)
    head = relu(m, x, unread)
    if kind == "carry":
        relu(m, y, unread)
    elif kind == "move":
        m.move(unread, m.tensor([4], planned=False))
    else:
        rows, row, other = m.tensor([2, 2], at=32), m.tensor([2], at=48), m.tensor([2], at=32)
        relu(m, m.constant(torch.ones(2)), other)  # onto rows that an earlier turn filled
        relu(m, other, row)
        m.call("executorch_prim::et_copy_index.tensor", rows, row, m.integer(0))
        m.plan.chains[0].instructions.pop(head)
    m.jump(done, head)
    relu(m, view, out)
    program = load(m.ends([done, x], [out]))
    assert program.run("forward", torch.tensor(True), torch.ones(4))[0].tolist() == [[1.0] * 2] * 2


def test_a_loop_reads_what_its_last_round_wrote(build: Any) -> None:
    for name, at in (("apart", 48), ("onto", 8)):
        m = build.method(name)
        done, x = m.tensor([], torch.bool, at=96), m.tensor([4], at=0)
        total, spoiler = m.tensor([4], at=32), m.tensor([4], at=at)
        relu(m, x, total)
        add(m, total, x, total)
        relu(m, total, spoiler)
        m.jump(done, 1)
        m.ends([done, x], [total])
    program = load(build.program)
    program.method("apart")
    with pytest.raises(MemoryPlanError, match="onto value"):
        program.method("onto")


@pytest.mark.parametrize("rounds", [1, 2])
def test_rows_of_rounds_before_stay_until_all_are_filled(build: Any, rounds: int) -> None:
    for name, at in (("apart", 80), ("onto", 48)):
        m = build.method(name)
        done, x, row = m.tensor([], torch.bool, at=128), m.tensor([2], at=0), m.tensor([2], at=16)
        rows, spoiler, result = m.tensor([4, 2], at=32), m.tensor([2], at=at), m.tensor([4, 2])
        head = relu(m, x, spoiler)
        relu(m, spoiler, row)
        m.call("executorch_prim::et_copy_index.tensor", rows, row, m.integer(0))
        m.jump(done, head)
        relu(m, rows, result)
        if rounds == 2:
            # The next time the same rows are filled, what lay there is of no use to anybody.
            relu(m, x, m.tensor([8], at=32))
            m.jump(done, 0)
        m.ends([done, x], [result])
    program = load(build.program)
    program.method("apart")
    with pytest.raises(MemoryPlanError, match=r"writes value 4 onto value 3, which is read later"):
        program.method("onto")


def test_methods_must_agree_where_their_state_lies(build: Any) -> None:
    for name, at in (("one", 0), ("two", 16)):
        m = build.method(name)
        state = m.tensor([4], memory_id=2, at=at, name="cache", initial=torch.ones(4))
        x, out = m.tensor([4]), m.tensor([4])
        add(m, state, x, out)
        m.ends([x], [out])
    with pytest.raises(
        MemoryPlanError, match="'cache' has a different location than in method 'one'"
    ):
        load(build.program)
    load(build.program, memory="unchecked")
    tensor = build.program.execution_plan[1].values[0].val
    tensor.extra_tensor_info.fully_qualified_name = "other"
    load(build.program)
    tensor.allocation_info.memory_offset_low = 8
    with pytest.raises(MemoryPlanError, match="'other' overlaps 'cache' of method 'one'"):
        load(build.program)


def test_a_method_that_is_too_large_to_check_is_refused(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, out = method.tensor([4]), method.tensor([4])
    relu(method, x, out)
    program = method.ends([x], [out])
    monkeypatch.setattr("lowerdeck.runner.memory.overlaps.MAX_BITS", 1)
    with pytest.raises(MemoryPlanError, match="memory='unchecked'"):
        load(program).method()
    load(program, memory="unchecked").method()


def test_a_result_on_its_own_input_is_refused_unless_the_kernel_bears_it(build: Any) -> None:
    m = build.method("elementwise")
    x, out = m.tensor([2, 2], at=0), m.tensor([2, 2], at=0)
    relu(m, x, out)
    m.ends([x], [out])
    m = build.method("matmul")
    x, out = m.tensor([2, 2], at=0), m.tensor([2, 2], at=0)
    m.call("aten::mm.out", x, x, out, out)
    m.ends([x], [out])
    m = build.method("one value")
    x = m.tensor([2, 2], at=0)
    m.call("aten::mm.out", x, x, x, x)
    m.ends([x], [x])
    m = build.method("shifted")
    x, out = m.tensor([2, 2], at=0), m.tensor([2, 2], at=4)
    relu(m, x, out)
    program = load(m.ends([x], [out]), memory="poison")
    assert torch.equal(program.run("elementwise", torch.ones(2, 2))[0], torch.ones(2, 2))
    for name in ("matmul", "one value", "shifted"):
        with pytest.raises(MemoryPlanError, match="onto its own input"):
            program.method(name)


def test_a_second_name_for_bytes_keeps_them_alive_and_may_be_written(method: Any) -> None:
    x, first, out = (method.tensor([2], at=at) for at in (0, 16, 32))
    again = method.tensor([1, 2], at=16)  # another name for the bytes of ``first``
    flat = method.tensor([1, 2], at=48)
    relu(method, x, first)
    relu(method, first, out)
    relu(method, again, again)
    relu(method, again, flat)
    relu(method, first, out)
    program = method.ends([x], [out, flat])
    assert load(program, memory="poison").run("forward", torch.ones(2))[0].tolist() == [1.0, 1.0]


def test_dead_bytes_are_filled(method: Any) -> None:
    x, first, second, out = (method.tensor([2], at=at) for at in (0, 16, 32, 48))
    relu(method, x, first)
    relu(method, first, second)
    relu(method, second, out)
    loaded = load(method.ends([x], [out]), memory="poison").method()
    loaded.run_flat([torch.ones(2)])
    registers: Any = loaded._frame.registers
    assert registers[x].isnan().all()
    assert registers[first].isnan().all()
    assert registers[out].tolist() == [1.0, 1.0]


def test_state_is_never_poisoned(build: Any) -> None:
    m = build.method()
    named = m.tensor([2], name="cache", memory_id=2)
    initial = m.tensor([2], initial=torch.ones(2), memory_id=1)
    x, out = m.tensor([2], memory_id=1), m.tensor([2], memory_id=1)
    add(m, x, named, out)
    m.call("aten::copy_", named, out, m.boolean(False), named)
    add(m, named, initial, out)
    program = load(m.ends([x], [out]), memory="poison")
    assert program.run("forward", torch.ones(2))[0].tolist() == [2.0, 2.0]
    assert program.run("forward", torch.ones(2))[0].tolist() == [3.0, 3.0]


def stateful(build: Any) -> Any:
    """Two methods with state at the same offset of memory 2; both also use memory 1."""
    for name in ("fill", "read"):
        m = build.method(name)
        cache = m.tensor([2], name="cache", memory_id=2, at=0, initial=torch.tensor([7.0, 8.0]))
        x, out = m.tensor([2]), m.tensor([2])
        add(m, x, cache, out)
        if name == "fill":
            m.call("aten::copy_", cache, x, m.boolean(False), cache)
        m.ends([x], [out])
    return build.program


def test_methods_share_a_memory_that_holds_only_state(build: Any) -> None:
    program = load(stateful(build))
    zeros = torch.zeros(2)
    assert program.run("read", zeros)[0].tolist() == [7.0, 8.0]
    assert program.run("fill", torch.ones(2))[0].tolist() == [8.0, 9.0]
    assert program.run("read", zeros)[0].tolist() == [1.0, 1.0]
    state = program.method("read").state()
    assert {name: held.tolist() for name, held in state.items()} == {"cache": [1.0, 1.0]}
    state["cache"].fill_(5)
    assert program.run("read", zeros)[0].tolist() == [1.0, 1.0]
    program.reset()
    assert program.run("read", zeros)[0].tolist() == [7.0, 8.0]


def test_state_is_whole_where_the_file_has_views_of_it(method: Any) -> None:
    m = method
    first = torch.tensor([7.0, 8.0, 9.0])
    cache = m.tensor([3], name="cache", memory_id=2, at=0, initial=first)
    part = m.tensor([2], name="cache", memory_id=2, at=4)
    x, out = m.tensor([2]), m.tensor([2])
    add(m, x, part, out)
    m.call("aten::copy_", part, x, m.boolean(False), part)
    method = load(m.ends([x, cache], [out])).method("forward")
    assert method.state()["cache"].tolist() == [7.0, 8.0, 9.0]


@pytest.mark.parametrize("knows", [False, True])
def test_a_method_made_later_leaves_what_another_wrote(build: Any, knows: bool) -> None:
    first = torch.tensor([7.0, 8.0, 9.0])
    fill = build.method("fill")
    # What overwrites a state, or a part of it, need not know what it was.
    known = {"initial": first[:2]} if knows else {}
    cache = fill.tensor([2], name="cache", memory_id=2, at=0, **known)
    x = fill.tensor([2])
    fill.call("aten::copy_", cache, x, fill.boolean(False), cache)
    fill.ends([x], [x])
    read = build.method("read")
    cache = read.tensor([3], name="cache", memory_id=2, at=0, initial=first)
    zero, out = read.tensor([3]), read.tensor([3])
    add(read, zero, cache, out)
    read.ends([zero], [out])
    for names in (["fill"], ["read", "fill"]):
        program = load(build.program)
        for name in names:
            program.method(name)
        program.run("fill", torch.ones(2))
        assert program.run("read", torch.zeros(3))[0].tolist() == [1.0, 1.0, 9.0]


def test_memory_that_cannot_be_is_refused(build: Any) -> None:
    m = build.method("outside")
    x = m.tensor([4])
    m.plan.non_const_buffer_sizes[1] = 8
    m.ends([x], [x])
    m = build.method("odd")
    x = m.tensor([4], at=2)
    m.ends([x], [x])
    m = build.method("negative")
    x = m.tensor([4])
    m.plan.non_const_buffer_sizes[1] = -1
    m.ends([x], [x])
    m = build.method("huge")
    m.plan.non_const_buffer_sizes.append(2**62)
    m.ends([], [])
    m = build.method("beyond")
    x = m.tensor([4])
    m.plan.values[x].val.allocation_info.memory_id = 9
    program = load(m.ends([x], [x]))
    for name, message in (
        ("outside", "ends at byte 16 of a planned memory of 8 bytes"),
        ("odd", "not a multiple of its 4 bytes"),
        ("negative", "has the size -1"),
        ("huge", "cannot allocate"),
        ("beyond", "has memory id 9, but the method has 1"),
    ):
        with pytest.raises(ProgramError, match=message):
            program.method(name)


def test_a_name_of_the_same_shape_is_taken(method: Any) -> None:
    # ExecuTorch leaves out the copy that a reshape to the same shape would be.
    x, first, second, out = (method.tensor([4], at=at) for at in (0, 16, 16, 32))
    relu(method, x, first)
    add(method, first, second, out)
    program = load(method.ends([x], [out]))
    assert program.run("forward", torch.ones(4))[0].tolist() == [2.0] * 4
