"""Comparison with eager inside delegates that compute on small integers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowerdeck.runner import Comparison, compare, load
from lowerdeck.runner.comparison.quanta import Grid, expected_of, grid_of
from lowerdeck.runner.profile import Event


@dataclass(frozen=True)
class Precision:
    step: float | None = None
    zero_point: int = 0
    limits: tuple[int, int] = (-128, 127)
    at_run_time: bool = False
    relative: float = 0.0


class Rounding:
    """A runtime that doubles, and then takes the tangent, in steps.

    Args:
        precision: What it tells of each.
        off: What it adds to the doubled.
    """

    def __init__(self, precision: Mapping[int, Precision], off: float = 0.0) -> None:
        self._precision, self._off = precision, off

    def init(self, blob: memoryview, compile_specs: object, named_data: object) -> str:
        return "handle"

    def input_count(self, handle: str) -> int:
        return 1

    def execute(self, handle: str, inputs: Sequence[Any]) -> list[torch.Tensor]:
        return self.execute_logged(handle, inputs, lambda *_: None)

    def execute_logged(self, handle: str, inputs: Sequence[Any], log: Any) -> list[torch.Tensor]:
        doubled = self._held(inputs[0] * 2 + self._off, 0)
        log(0, 0, 1, (doubled,), "Double", self._reported(0))
        result = self._held(doubled.tan(), 1)
        log(1, 1, 2, (result,), "Tan", self._reported(1))
        return [result]

    def _reported(self, which: int) -> Precision | None:
        return self._precision.get(which)

    def _held(self, numbers: torch.Tensor, which: int) -> torch.Tensor:
        how = self._precision.get(which, Precision())
        if how.step is None:
            return numbers
        return ((numbers / how.step).round().clamp(*how.limits)) * how.step


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tan(x * 2)


X = torch.tensor([0.1, 0.74, -0.33, 0.5])


def comparison_of(m: Any, runtime: Rounding, model: Any = None) -> Comparison:
    """Return what differs of a program that is one delegate, matched by node."""
    x, out = m.tensor([4]), m.tensor([4])
    m.delegate("Rounding", [x, out])
    nodes = ("mul", "tan")
    sources = {
        at: SimpleNamespace(
            handles=(at,),
            node=name,
            operator=f"aten.{name}.default",
            source_line="",
            module_path="",
        )
        for at, name in enumerate(nodes)
    }
    inside = SimpleNamespace(debug_handle_map={0: (0,), 1: (1,)}, sources=sources)
    maps = SimpleNamespace(debug_handle_map={}, delegate_debug_maps={"forward": {0: inside}})
    program = load(m.ends([x], [out]), backends={"Rounding": runtime}, debug=maps)
    return compare(program, model or torch.export.export(Model(), (X,)), (X,))


def test_what_one_operator_rounds_is_not_held_against_the_next(method: Any) -> None:
    # The tangent of 1.5 is fourteen, and that of 1.48 eleven.
    both = {0: Precision(0.1), 1: Precision(0.2)}
    comparison = comparison_of(method, Rounding(both))
    assert comparison.first is None, str(comparison)
    assert comparison.compared == 3


def test_integers_that_are_told_as_floats_differ(method: Any) -> None:
    class Silent(Rounding):
        def _reported(self, which: int) -> None: ...

    found = comparison_of(method, Silent({0: Precision(0.1)})).first
    assert found is not None
    assert (found.place.node, found.label) == ("mul", "Double")


@pytest.mark.parametrize(("off", "is_right"), [(0.1, True), (0.31, False)])
def test_one_step_is_allowed_and_two_are_not(method: Any, off: float, is_right: bool) -> None:
    comparison = comparison_of(method, Rounding({0: Precision(0.1)}, off))
    assert (comparison.first is None) is is_right
    if comparison.first is not None:
        assert comparison.first.place.node == "mul"
        assert str(comparison.first).startswith("instruction 0 (Rounding[0]/0 Double) differs")
        # What was computed of it differs from what it should have been computed of.
        assert [one.place.node for one in comparison.differences[:2]] == ["mul", "tan"]


def test_saturation_is_no_difference(method: Any) -> None:
    limits = {0: Precision(0.1, limits=(-3, 3)), 1: Precision(0.1)}
    comparison = comparison_of(method, Rounding(limits))
    assert comparison.first is None, str(comparison)


def test_of_two_scales_after_a_node_the_event_s_own_counts() -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x.relu()
            quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
            return (
                quantize(y, 0.5, 3, -128, 127, torch.int8),
                quantize(y, 0.25, 1, -128, 127, torch.int8),
            )

    importlib.import_module("torch.ao.quantization.fx._decomposed")
    graph = torch.export.export(Twice(), (X,)).graph
    (node,) = (one for one in graph.nodes if one.name == "relu")
    event = Event(0, 0, "relu", 0, 0, precision=Precision(0.25, 1))
    assert grid_of(event, node) == Grid(0.25, 1, -128, 127)
    halved = Event(0, 0, "relu", 0, 0, precision=Precision(0.6, 1))
    assert grid_of(halved, node) == Grid(0.5, 3, -128, 127)


def test_short_floats_may_be_off_by_a_part_of_the_largest() -> None:
    event = Event(0, 0, "half", 0, 0, precision=Precision(relative=2.0**-10))
    assert expected_of(event, torch.tensor([-4.0, float("inf")])).slack == 2.0**-8
