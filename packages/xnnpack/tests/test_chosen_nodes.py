"""Which of XNNPACK's operators a node becomes where several give the right numbers in Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from case_making import Function  # type: ignore[import-not-found]
from torch import nn
from xnnpack_lowering import labels, lower, whole  # type: ignore[import-not-found]

from lowerdeck.xnnpack import XnnpackPartitioner


def _operators(module: nn.Module, *inputs: torch.Tensor) -> list[str]:
    found: list[str] = labels(whole(lower(module, inputs)))
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_of_one_number_is_no_convolution(bias: bool) -> None:
    operators = _operators(nn.Conv2d(1, 1, 1, bias=bias), torch.randn(1, 1, 6, 6))
    assert "Multiply" in operators
    assert "Conv2d" not in operators


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(1, 1, (2, 1)),
        nn.Conv2d(1, 1, (1, 2)),
        nn.Conv2d(1, 1, 1, stride=2),
        nn.Conv2d(1, 1, 1, padding=1),
        nn.Conv2d(1, 2, 1),
        nn.Conv2d(2, 1, 1),
    ],
    ids=str,
)
def test_any_other_convolution_is_one(layer: nn.Conv2d) -> None:
    operators = _operators(layer, torch.randn(1, layer.in_channels, 6, 6))
    assert "Conv2d" in operators


@pytest.mark.parametrize(
    ("function", "one_node"),
    [
        (lambda x: torch.rsqrt(x * x + 1e-6), True),
        (lambda x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), True),
        (lambda x: torch.rsqrt(x * x + 0.0), False),
        (lambda x: torch.rsqrt(x * x - 1e-6), False),
        (lambda x: torch.rsqrt(x.pow(3) + 1e-6), False),
        (torch.rsqrt, False),
    ],
)
def test_a_reciprocal_square_root_is_one_node_only_where_no_zero_can_come(
    function: Callable[[torch.Tensor], torch.Tensor], one_node: bool
) -> None:
    operators = _operators(Function(function), torch.randn(2, 3))
    assert ("ReciprocalSquareRoot" in operators) is one_node


@pytest.mark.parametrize(("axes", "taken"), [((2, 3), True), ((1, 3), False), ((1, 2), False)])
def test_images_of_any_size_are_averaged_over_height_and_width_alone(
    axes: tuple[int, int], taken: bool
) -> None:
    height, width = torch.export.Dim("height", max=64), torch.export.Dim("width", max=64)
    module = Function(lambda x: (x * 2).mean(axes))
    partitioner = XnnpackPartitioner()
    image = torch.randn(2, 3, 5, 7)
    lower(module, (image,), partitioner, dynamic_shapes=(({2: height, 3: width},),))
    assert ("mean" not in partitioner.refused) is taken
