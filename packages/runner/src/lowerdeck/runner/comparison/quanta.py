"""Round eager's values to quantized integers or low-precision floats."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from lowerdeck.runner._torch_private import operator_name
from lowerdeck.runner.profile import Event

_INTEGERS = frozenset({torch.int8, torch.uint8})
_REAL = _INTEGERS | {torch.float64, torch.float32, torch.float16, torch.bfloat16}
"""Eager dtypes of quantizable values, not bools and indices."""


class Expected(NamedTuple):
    """Expected result of an event.

    Attributes:
        value: Eager's values, rounded to the program's representation.
        slack: Additional absolute tolerance.
    """

    value: torch.Tensor
    slack: float = 0.0


class Grid(NamedTuple):
    """Per-tensor affine quantization."""

    step: float
    zero_point: int
    least: int
    most: int

    def real(self, integers: torch.Tensor) -> torch.Tensor:
        """Return dequantized integers."""
        return (integers.double() - self.zero_point) * self.step

    def integers(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return quantized integers as float64; NaN becomes the largest."""
        wide = (numbers.double() / self.step).nan_to_num(nan=torch.inf, posinf=torch.inf)
        return (wide.round() + self.zero_point).clamp(self.least, self.most)


def expected_of(event: Event, value: torch.Tensor, node: fx.Node | None = None) -> Expected:
    """Return the expected result of an event for eager's ``value``.

    Events with integer results include the rounding of eager's later quantize node. Eager's scale
    and limits are used if known, because a program with other ones is wrong.

    Args:
        node: The event's node, if eager is an exported program.
    """
    precision = event.precision
    if precision is None or value.dtype not in _REAL or not value.numel():
        return Expected(value)
    if precision.step is None:
        return Expected(value, _largest(value) * precision.relative)
    grid = grid_of(event, node)
    assert grid is not None
    real = grid.real(value if value.dtype in _INTEGERS else grid.integers(value))
    # Slightly more than a step, for rounding in the subtraction.
    return Expected(real, grid.step * (1 + 1e-4) + _largest(real) * precision.relative)


def grid_of(event: Event, node: fx.Node | None = None) -> Grid | None:
    """Return the quantization of an event's result, or None for floats.

    Args:
        node: The event's node; if the node or a user quantizes, that call determines the scale.
    """
    precision = event.precision
    if precision is None or precision.step is None:
        return None
    own = Grid(precision.step, precision.zero_point, *precision.limits)
    near = () if node is None else (node, *node.users)
    grids = [grid for reader in near if (grid := _grid_of_node(reader))]
    # Users may quantize to different scales, each in a separate event.
    return min(grids, key=lambda grid: abs(grid.step - own.step), default=own)


def _grid_of_node(node: fx.Node) -> Grid | None:
    if not name_of(node).startswith("quantize_per_tensor"):
        return None
    match node.args:
        case [_, float() | int() as step, int(zero_point), int(least), int(most), *_]:
            return Grid(float(step), zero_point, least, most)
    return None


def name_of(node: fx.Node) -> str:
    """Return a node's operator name without namespace, such as ``quantize_per_tensor``."""
    return (operator_name(node.target) or "").rpartition("::")[2]


def step_at_run_time(numbers: torch.Tensor) -> float:
    """Return the 8-bit quantization step for a scale chosen at run time.

    Args:
        numbers: All values of the tensor. Steps of single rows are not larger.
    """
    if not numbers.numel():
        return 0.0
    low, high = numbers.double().aminmax()
    return float(high.clamp(min=0) - low.clamp(max=0)) / 255


def _largest(value: torch.Tensor) -> float:
    finite = value.double().abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(finite.max())
