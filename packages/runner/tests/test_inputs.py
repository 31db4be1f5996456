"""Inputs and outputs in the structure of the original function."""

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from lowerdeck.runner import InputError, load


def sums(m: Any, count: int, args: Any, kwargs: Any, result: Any) -> Any:
    """Return a method that doubles each of ``count`` inputs."""
    inputs = [m.tensor([1]) for _ in range(count)]
    outs = [m.tensor([1]) for _ in range(count)]
    one = m.integer(1)
    for x, out in zip(inputs, outs, strict=True):
        m.call("aten::add.out", x, x, one, out, out)
    dump = pytree.treespec_dumps
    m.structure(dump(pytree.tree_structure((args, kwargs))), dump(pytree.tree_structure(result)))
    return load(m.ends(inputs, outs))


def value(number: float) -> torch.Tensor:
    return torch.tensor([float(number)])


def test_nested_inputs_give_nested_outputs(method: Any) -> None:
    program = sums(method, 4, ((0, [0]), {"k": 0}), {"mask": 0}, {"a": [0, (0,)], "b": [0, 0]})
    result = program.run("forward", (value(1), [value(2)]), {"k": value(3)}, mask=value(4))
    assert result == {"a": [value(2), (value(4),)], "b": [value(6), value(8)]}


def test_flat_inputs_are_accepted_for_a_nested_signature(method: Any) -> None:
    program = sums(method, 3, ([0, 0],), {"z": 0}, {"x": 0, "y": (0, 0)})
    flat = program.run("forward", value(1), value(2), value(3))
    nested = program.run("forward", [value(1), value(2)], z=value(3))
    assert flat == nested == {"x": value(2), "y": (value(4), value(6))}


def test_a_single_result_is_returned_bare(method: Any) -> None:
    program = sums(method, 1, (0,), {}, 0)
    assert program.run("forward", value(3)) == value(6)


def test_errors_name_the_argument_of_the_original_function(method: Any) -> None:
    program = sums(method, 3, ([0, 0],), {"mask": 0}, [0, 0, 0])
    with pytest.raises(InputError, match=r"^args\[0\]\[1\] is torch.int64") as caught:
        program.run("forward", [value(1), torch.tensor([1])], mask=value(1))
    assert caught.value.argument == "args[0][1]"
    with pytest.raises(InputError, match=r"^kwargs\['mask'\] has shape \[2\]"):
        program.run("forward", [value(1), value(1)], mask=torch.zeros(2))
    with pytest.raises(InputError, match=r"takes 3: args\[0\]\[0\], args\[0\]\[1\], kwargs"):
        program.run("forward", value(1))


def test_an_unreadable_structure_leaves_flat_calls(method: Any) -> None:
    program = sums(method, 2, (0, 0), {}, (0, 0))
    for text in ("{", "[1, null]", '[1, {"type": "no.such.Class", "context": "null"}]', "[]"):
        method.structure(text, text)
        program = load(method.owner.program)
        assert program.run("forward", value(1), value(2)) == [value(2), value(4)]


def test_the_caller_s_tensor_is_used_where_inputs_are_not_planned(method: Any) -> None:
    x, out = method.tensor([2], planned=False), method.tensor([2])
    method.call("aten::add.out", x, x, method.integer(1), out, out)
    method.call("aten::copy_", x, out, method.boolean(False), x)
    forward = load(method.ends([x], [out])).method()
    mine = torch.tensor([1.0, 2.0])
    forward.run_flat([mine])
    assert mine.tolist() == [2.0, 4.0]
    forward.run_flat([torch.nn.Parameter(torch.zeros(2))])
    assert mine.tolist() == [2.0, 4.0]


def test_channels_last_inputs_must_be_channels_last(method: Any) -> None:
    x = method.tensor([2, 3, 4, 4], dim_order=[0, 2, 3, 1])
    forward = load(method.ends([x], [x])).method()
    images = torch.randn(2, 3, 4, 4)
    with pytest.raises(InputError, match="channels_last"):
        forward.run_flat([images])
    right = images.to(memory_format=torch.channels_last)
    assert torch.equal(forward.run_flat([right])[0], images)


@pytest.mark.parametrize(
    ("order", "tensor", "cure"),
    [
        ((0, 1), torch.arange(12.0).view(2, 6)[:, ::2], "call .contiguous() on it"),
        ((0, 1), torch.arange(6.0).view(3, 2).t(), "call .contiguous() on it"),
        ((1, 0), torch.arange(12.0).view(6, 2)[::2].t(), "call .permute([1, 0])"),
        (
            (0, 2, 3, 1),
            torch.randn(2, 4, 4, 6)[..., ::2].permute(0, 3, 1, 2),
            "memory_format=torch.channels_last)",
        ),
        ((0, 2, 3, 4, 1), torch.randn(1, 3, 2, 2, 2), "memory_format=torch.channels_last_3d)"),
        ((2, 0, 1), torch.randn(2, 3, 4), "call .permute([2, 0, 1])"),
    ],
    ids=["gaps", "transposed", "gaps, transposed", "gaps, last", "volumes", "permuted"],
)
def test_what_lies_otherwise_is_told_by_strides_with_a_cure_that_works(
    order: tuple[int, ...], tensor: torch.Tensor, cure: str, method: Any
) -> None:
    x = method.tensor(list(tensor.shape), dim_order=list(order))
    forward = load(method.ends([x], [x])).method()
    with pytest.raises(InputError) as refused:
        forward.run_flat([tensor])
    told = str(refused.value)
    assert cure in told
    found, _, expected = told.partition("; ")
    assert str(list(tensor.stride())) in found
    assert str(list(tensor.stride())) not in expected
    call = told.rpartition("call ")[2].removesuffix(" on it")
    mended = eval(f"tensor{call}")
    assert torch.equal(forward.run_flat([mended])[0], tensor)


@pytest.mark.parametrize("number", [5.0, float("nan")])
def test_fixed_numbers_are_those_of_the_export(number: float, method: Any) -> None:
    x = method.tensor([1])
    forward = load(method.ends([x, method.double(number)], [x])).method()
    assert torch.equal(forward.run_flat([value(1), number])[0], value(1))
    with pytest.raises(InputError, match=r"is 6\.0; the program is specialized to"):
        forward.run_flat([value(1), 6.0])


def test_results_can_take_part_in_autograd(method: Any) -> None:
    x = method.tensor([2])
    result = load(method.ends([x], [x])).method().run_flat([torch.ones(2, requires_grad=True)])[0]
    weight = torch.ones(2, requires_grad=True)
    (result * weight).sum().backward()
    assert weight.grad is not None
