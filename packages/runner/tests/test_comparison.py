"""Comparison with eager: the first operator that differs is found and named."""

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


def loaded(program: Any, *nodes: str, **options: Any) -> Any:
    """Load a program whose instructions come from nodes, by default those of the model."""
    names = nodes or ("relu", "mul", "neg")
    sources = {at: Source((), name, module_path=f"m.{name}") for at, name in enumerate(names)}
    return load(program, debug=Maps({"forward": sources}, {}), **options)


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.tensor([1.0, -1.0, 2.0, 0.5]),)


def test_equal_programs_have_no_difference(method: Any) -> None:
    comparison = compare(loaded(program_of(method)), Model(), inputs())
    assert comparison.first is None
    assert comparison.compared == 4
    told = "4 results of lowerdeck.runner compared, 0 without a counterpart"
    assert str(comparison) == f"equal to eager ({told})"


def test_the_first_operator_that_differs_is_named_with_eager_s_line(method: Any) -> None:
    comparison = compare(loaded(program_of(method, 2.0)), Model(), inputs())
    first = comparison.first
    assert first is not None
    assert (first.instruction, first.name, first.eager_name) == (1, "aten::mul.out", "aten::mul")
    assert first.largest == pytest.approx(2.0)
    assert "at m.mul" in str(first)
    # Without maps only results are compared.
    plain = compare(load(program_of(method, 2.0)), Model(), inputs())
    assert [difference.name for difference in plain.differences] == ["output 0"]
    assert len(plain.unmatched) == 3
    assert [difference.name for difference in comparison.differences] == [
        "aten::mul.out",
        "aten::neg.out",
        "output 0",
    ]


def test_tolerances_decide(method: Any) -> None:
    program = loaded(program_of(method, 3.001))
    assert compare(program, Model(), inputs()).first is not None
    assert compare(program, Model(), inputs(), rtol=1e-2).first is None
    assert compare(program, Model(), inputs(), atol=1e-2).first is None


def test_nan_where_eager_has_a_number_differs_without_bound(method: Any) -> None:
    comparison = compare(loaded(program_of(method, float("nan"))), Model(), inputs())
    assert comparison.first is not None
    assert comparison.first.largest == float("inf")
    both = compare(loaded(program_of(method, float("nan"))), Model(float("nan")), inputs())
    assert both.first is None


def test_what_has_no_counterpart_is_listed(method: Any) -> None:
    x, y, z = method.tensor([4]), method.tensor([4]), method.tensor([4])
    method.call("aten::relu.out", x, y, y)
    method.call("aten::sin.out", y, z, z)
    comparison = compare(loaded(method.ends([x], [y]), "relu", "sin"), Of(torch.relu), inputs())
    assert comparison.first is None
    assert [event.name for event in comparison.unmatched] == ["aten::sin.out"]


def test_a_wrong_output_is_found_even_if_no_operator_differs(method: Any) -> None:
    x, y = method.tensor([4]), method.tensor([4])
    method.call("aten::relu.out", x, y, y)
    comparison = compare(loaded(method.ends([x], [x]), "relu"), Of(torch.relu), inputs())
    assert comparison.first is not None
    assert comparison.first.name == "output 0"
    assert str(comparison.first).startswith("output 0 differs from eager's result by up to 1")


def test_different_numbers_of_outputs_are_told(method: Any) -> None:
    with pytest.raises(InputError, match="returns 1 results, the model 2"):
        compare(loaded(program_of(method)), Of(lambda x: (x, x)), inputs())


def test_inputs_are_left_alone(method: Any) -> None:
    x = method.tensor([4], planned=False)
    method.call("aten::neg.out", x, x, x)

    given = inputs()
    negate = Of(lambda value: value.neg_())
    assert compare(loaded(method.ends([x], [x]), "neg_"), negate, given).first is None
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

    model = Of(lambda x: -torch.max(x, 1)[0])
    program = loaded(m.ends([x], [out]), "max_1", "neg", memory="poison")
    comparison = compare(program, model, (torch.tensor([[1.0, 5.0, 2.0], [0.0, 1.0, 7.0]]),))
    assert comparison.first is None
    assert comparison.compared == 4


def test_inputs_that_are_no_tuple_are_refused(method: Any) -> None:
    with pytest.raises(InputError, match=r"found a Tensor as inputs.*\(x,\)"):
        compare(loaded(program_of(method)), Model(), torch.ones(4))  # type: ignore[arg-type]


def test_outputs_that_are_no_numbers_are_compared(method: Any) -> None:
    x, none = method.tensor([4]), method.null()
    program = load(method.ends([x], [x, none]))
    assert compare(program, Of(lambda x: (x, None)), inputs()).first is None
    with pytest.raises(InputError, match="output 1 is None"):
        compare(program, Of(lambda x: (x, "text")), inputs())
