"""Comparison with eager: the first operator that differs is found and named."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lowerdeck.runner import InputError, compare, load
from lowerdeck_zoo import Of


class Model(torch.nn.Module):
    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        z = torch.mul(y, 3.0 + self.offset)
        return torch.neg(z)


@dataclass
class Source:
    handles: tuple[int, ...]
    node: str
    source_line: str = ""
    module_path: str = ""
    operator: str = ""


@dataclass
class Maps:
    debug_handle_map: dict[str, dict[int, Any]]
    delegate_debug_maps: dict[str, dict[int, Any]]


def program_of(like: Any, factor: float = 3.0) -> Any:
    """Return relu, mul by ``factor`` and neg, as an emitter would write them."""
    m = type(like.owner)().method()
    x, y, z, out = (m.tensor([4]) for _ in range(4))
    m.call("aten::relu.out", x, y, y)
    m.call("aten::mul.out", y, m.constant(torch.tensor(factor)), z, z)
    m.call("aten::neg.out", z, out, out)
    return m.ends([x], [out])


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.tensor([1.0, -1.0, 2.0, 0.5]),)


def test_equal_programs_have_no_difference(method: Any) -> None:
    comparison = compare(load(program_of(method)), Model(), inputs())
    assert comparison.first is None
    assert comparison.compared == 4
    told = "4 results of lowerdeck.runner compared, 0 without a counterpart"
    assert str(comparison) == f"equal to eager ({told})"


def test_the_first_operator_that_differs_is_named_with_eager_s_line(method: Any) -> None:
    comparison = compare(load(program_of(method, 2.0)), Model(), inputs())
    first = comparison.first
    assert first is not None
    assert (first.instruction, first.name, first.eager_name) == (1, "aten::mul.out", "aten::mul")
    assert first.largest == pytest.approx(2.0)
    assert "in forward" in str(first)
    assert [difference.name for difference in comparison.differences] == [
        "aten::mul.out",
        "aten::neg.out",
        "output 0",
    ]


def test_tolerances_decide(method: Any) -> None:
    program = load(program_of(method, 3.001))
    assert compare(program, Model(), inputs()).first is not None
    assert compare(program, Model(), inputs(), rtol=1e-2).first is None
    assert compare(program, Model(), inputs(), atol=1e-2).first is None


def test_nan_where_eager_has_a_number_differs_without_bound(method: Any) -> None:
    comparison = compare(load(program_of(method, float("nan"))), Model(), inputs())
    assert comparison.first is not None
    assert comparison.first.largest == float("inf")
    both = compare(load(program_of(method, float("nan"))), Model(float("nan")), inputs())
    assert both.first is None


def test_an_exported_program_is_matched_by_node(method: Any) -> None:
    exported = torch.export.export(Model(), inputs())
    sources = {
        number: Source((), name, module_path=f"m.{name}")
        for number, name in enumerate(("relu", "mul", "neg"))
    }
    maps = Maps({"forward": sources}, {})
    program = load(program_of(method, 2.0), debug=maps)
    comparison = compare(program, exported, inputs())
    assert comparison.first is not None
    assert comparison.first.name == "aten::mul.out"
    assert "at m.mul" in str(comparison.first)
    # Without maps, order and operator tell the same.
    by_order = compare(load(program_of(method, 2.0)), exported, inputs())
    assert by_order.first is not None
    assert by_order.first.name == "aten::mul.out"


def test_what_has_no_counterpart_is_listed(method: Any) -> None:
    x, y, z = method.tensor([4]), method.tensor([4]), method.tensor([4])
    method.call("aten::relu.out", x, y, y)
    method.call("aten::sin.out", y, z, z)
    comparison = compare(load(method.ends([x], [y])), torch.relu, inputs())
    assert comparison.first is None
    assert [event.name for event in comparison.unmatched] == ["aten::sin.out"]


def test_a_wrong_output_is_found_even_if_no_operator_differs(method: Any) -> None:
    x, y = method.tensor([4]), method.tensor([4])
    method.call("aten::relu.out", x, y, y)
    comparison = compare(load(method.ends([x], [x])), torch.relu, inputs())
    assert comparison.first is not None
    assert comparison.first.name == "output 0"
    assert str(comparison.first).startswith("output 0 differs from eager's result by up to 1")


def test_different_numbers_of_outputs_are_told(method: Any) -> None:
    with pytest.raises(InputError, match="returns 1 results, the model 2"):
        compare(load(program_of(method)), lambda x: (x, x), inputs())


def test_inputs_are_left_alone(method: Any) -> None:
    x = method.tensor([4], planned=False)
    method.call("aten::neg.out", x, x, x)

    def negate(value: torch.Tensor) -> torch.Tensor:
        return value.neg_()

    given = inputs()
    assert compare(load(method.ends([x], [x])), negate, given).first is None
    assert torch.equal(given[0], inputs()[0])


def test_results_that_nothing_reads_are_compared_before_they_are_poisoned(method: Any) -> None:
    m = method
    x, most, indices, out = (
        m.tensor([2, 3]),
        m.tensor([2]),
        m.tensor([2], torch.int64),
        m.tensor([2]),
    )
    m.call("aten::max.dim_max", x, m.integer(1), m.boolean(False), most, indices, m.null())
    m.call("aten::neg.out", most, out, out)

    def model(x: torch.Tensor) -> torch.Tensor:
        return -torch.max(x, 1)[0]

    program = load(m.ends([x], [out]), memory="poison")
    comparison = compare(program, model, (torch.tensor([[1.0, 5.0, 2.0], [0.0, 1.0, 7.0]]),))
    assert comparison.first is None
    assert comparison.compared == 4


def test_branches_and_loops_of_eager_are_compared(method: Any) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        chosen = torch.cond(x.sum() > 0, torch.relu, torch.neg, (x,))
        loop = torch.ops.higher_order.while_loop
        result: torch.Tensor
        (result,) = loop(lambda y: y.sum() < 8, lambda y: (y * 2,), (chosen,), ())
        return result

    m = method
    x, y, z, out = (m.tensor([2]) for _ in range(4))
    two = m.constant(torch.tensor(2.0))
    m.call("aten::relu.out", x, y, y)
    m.call("aten::mul.out", y, two, z, z)
    m.call("aten::mul.out", z, two, out, out)
    program = load(m.ends([x], [out]))
    comparison = compare(program, model, (torch.tensor([3.0, -1.0]),))
    assert comparison.first is None
    assert comparison.compared == 4
    assert not comparison.unmatched


class Twins(torch.nn.Module):
    """Two layers of one shape; a compiler may well compute the second first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sub(self.first(x), self.second(x))


def twins(m: Any, model: Twins, spoilt: float = 0.0) -> tuple[Any, Maps]:
    x, one, two, out = (m.tensor([2, 3]) for _ in range(4))
    for layer, result in ((model.second, two), (model.first, one)):
        bias = layer.bias.detach() + (spoilt if layer is model.second else 0.0)
        weights = m.constant(layer.weight.detach()), m.constant(bias)
        m.call("aten::linear.out", x, *weights, result, result)
    m.call("aten::sub.out", one, two, m.integer(1), out, out)
    paths = {0: "second", 1: "first", 2: ""}
    sources = {at: Source((at,), f"n{at}", "", path) for at, path in paths.items()}
    return m.ends([x], [out]), Maps({"forward": sources}, {"forward": {}})


def test_the_layer_that_differs_is_named_whatever_the_order(method: Any) -> None:
    model = Twins()
    program, maps = twins(method, model, spoilt=0.5)
    found = compare(load(program, debug=maps), model, (torch.randn(2, 3),)).first
    assert found is not None
    assert (found.instruction, found.place.module_path) == (0, "second")


def test_what_a_module_does_more_often_in_eager_is_not_compared(method: Any) -> None:
    layer = Of(lambda x: torch.mul(torch.mul(x, 2.0), 3.0))
    m = method
    x, out = m.tensor([2]), m.tensor([2])
    m.call("aten::mul.out", x, m.constant(torch.tensor(6.0)), out, out)
    program = m.ends([x], [out])
    maps = Maps({"forward": {0: Source((1,), "mul", "", "layer")}}, {"forward": {}})

    comparison = compare(
        load(program, debug=maps),
        torch.nn.Sequential(OrderedDict(layer=layer)),
        (torch.ones(2),),
    )
    assert comparison.first is None
    assert [event.name for event in comparison.unmatched] == ["aten::mul.out"]


def test_inputs_that_are_no_tuple_are_refused(method: Any) -> None:
    with pytest.raises(InputError, match=r"found a Tensor as inputs.*\(x,\)"):
        compare(load(program_of(method)), Model(), torch.ones(4))  # type: ignore[arg-type]


def test_outputs_that_are_no_numbers_are_compared(method: Any) -> None:
    x, none = method.tensor([4]), method.null()
    program = load(method.ends([x], [x, none]))
    assert compare(program, lambda x: (x, None), inputs()).first is None
    with pytest.raises(InputError, match="output 1 is None"):
        compare(program, lambda x: (x, "text"), inputs())
