"""That payloads leave out what moves bytes around layers, counted by their operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_making import Function  # type: ignore[import-not-found]
from quantized_cases import IN, OUT, IntegerWeight  # type: ignore[import-not-found]
from tidied_cases import Gated, Places, Rotary, beside_mask, twice_causal  # type: ignore[import-not-found]
from torch import Tensor, nn
from xnnpack_lowering import labels, lower, named_data, run, whole  # type: ignore[import-not-found]

from lowerdeck.serializer import decode_payload

MOVES = ("Copy", "StaticReshape", "StaticSlice", "StaticTranspose")


def operators(model: nn.Module, *inputs: Tensor, **options: Any) -> Counter[str]:
    """Return how often each operator is in the one payload of a model."""
    delegate = whole(lower(model, inputs, **options))
    graph = decode_payload(delegate.processed_bytes)
    stored = {constant.key for constant in graph.constants if constant.key}
    assert stored == set(named_data(delegate))  # and nothing that nobody reads
    assert [node.debug_handle for node in graph.nodes] == list(range(len(graph.nodes)))
    return Counter(labels(delegate))


def stored_bytes(model: nn.Module, *inputs: Tensor) -> int:
    """Return how many bytes of constants the one payload of a model has."""
    return sum(map(len, named_data(whole(lower(model, inputs))).values()))


def test_gated_convolutions_over_time_move_nothing_between_them() -> None:
    found = operators(Gated(), torch.randn(2, 32, 20))
    moved = {name: count for name, count in found.items() if name.startswith("Static")}
    # In and out, where the program has channels before time.
    assert moved == {"StaticReshape": 2, "StaticTranspose": 2}
    assert (found["Conv2d"], found["Tanh"], found["Sigmoid"]) == (4, 2, 2)


@pytest.mark.parametrize(("amounts", "value", "left"), [((1, 2), 0.0, 0), ((1, 2), 1.0, 1)])
def test_zeros_before_a_convolution_are_its_own(
    amounts: tuple[int, ...], value: float, left: int
) -> None:
    model = Function(lambda x, m: m(F.pad(x, amounts, value=value)), nn.Conv2d(3, 4, 3))
    assert operators(model, torch.randn(1, 3, 8, 8))["StaticConstantPad"] == left


@pytest.mark.parametrize("sizes", [(32, 32, 32), (64, 32), (32, 64), (80, 16), (48, 48)])
def test_parts_that_fill_tiles_are_layers(sizes: tuple[int, ...]) -> None:
    model = Function(lambda x, m: m(x).split(sizes, -1), nn.Linear(8, 96))
    found = operators(model, torch.randn(3, 8))
    full = all(size % 32 == 0 for size in sizes)
    assert found["FullyConnected"] == (len(sizes) if full else 1)
    assert found["StaticSlice"] == (0 if full else len(sizes))


def test_layers_of_integers_are_parted_too() -> None:
    def call(x: Tensor, w: nn.Module) -> tuple[Tensor, ...]:
        return tuple(OUT(part) for part in OUT(F.linear(IN(x), w())).chunk(2, -1))

    found = operators(Function(call, IntegerWeight(64, 16)), torch.randn(3, 16))
    assert (found["FullyConnected"], found["StaticSlice"]) == (2, 0)


def test_a_weight_that_two_layers_read_stays_one() -> None:
    def call(x: Tensor, m: nn.Module) -> tuple[Tensor, ...]:
        return (*m(x).chunk(2, -1), m(x * 2))

    assert operators(Function(call, nn.Linear(8, 64)), torch.randn(3, 8))["FullyConnected"] == 2


@pytest.mark.parametrize(
    ("call", "left"),
    [
        (lambda x: x.view(6, 4).view(2, 12).relu(), {"StaticReshape": 1}),
        (lambda x: x.view(6, 4).view(2, 3, 4).relu(), {}),
        (lambda x: x.transpose(1, 2).transpose(0, 1).relu(), {"StaticTranspose": 1}),
        (lambda x: x.transpose(1, 2).transpose(1, 2).relu(), {}),
        (lambda x: x.mT.relu() + x.mT.sigmoid(), {"StaticTranspose": 1}),
        (lambda x: x[:, 1:, 1:][:, :2, 1:].relu(), {"StaticSlice": 1}),
        # Both views are read, and both read the input.
        (lambda x: (x.view(6, 4).relu(), x.view(6, 4).view(24).relu()), {"StaticReshape": 2}),
        # Results: two equal ones, one that is read as well, and one that is an input again.
        (lambda x: (x.mT, x.transpose(1, 2), x.relu()), {"StaticTranspose": 1, "Copy": 1}),
        (lambda x: (x.mT, x.mT.mT.sigmoid()), {"StaticTranspose": 1}),
        (lambda x: (x.relu(), x.mT.mT), {"Copy": 1}),
        # A write through a view is functionalized to a view and the view back.
        (lambda x: x.relu().view(-1, 4).view(x.shape), {}),
        (lambda x: x.relu().flatten().view(-1, 6, 2).view(x.shape), {}),
        (lambda x: x[:, :1].unbind(1)[0].relu(), {"StaticSlice": 1, "StaticReshape": 1}),
        (lambda x: x.mT[:, :, :1].relu().split(1, 2)[0], {"StaticTranspose": 1, "StaticSlice": 1}),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_consecutive_and_equal_moves_are_one(
    call: Callable[[Tensor], Any], left: dict[str, int], dynamic: bool
) -> None:
    x = torch.randn(2, 3, 4)
    options: dict[str, Any] = {}
    if dynamic and left.keys() <= {"Copy", "StaticTranspose"}:
        options = {"dynamic_shapes": (({0: torch.export.Dim.AUTO(min=2, max=9)},),)}
    delegate = whole(lower(Function(call), (x,), **options))
    found = Counter(labels(delegate))
    assert {name: found[name] for name in MOVES if found[name]} == left
    expected = call(x)
    wanted = expected if isinstance(expected, tuple) else (expected,)
    for one, other in zip(run(delegate, (x,)), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_causal_mask_is_computed_once_for_all_layers() -> None:
    tokens = (torch.randn(1, 2, 256, 8),) * 3
    assert stored_bytes(Function(twice_causal), *tokens) < 256 * 16
    assert operators(Function(twice_causal), *tokens)["Subtract"] == 1


@pytest.mark.parametrize(
    ("model", "shape", "stored"),
    [
        # One column of positions, one row of frequencies.
        (Rotary(), (1, 2, 128, 64), 4 * (128 + 32)),
        # Half of each row, as no function is known whose values these are.
        (Rotary(1.25), (1, 2, 128, 64), 2 * 4 * 128 * 32),
        (Places(flat=False), (1, 12, 20, 24), 4 * 12 * (20 + 24)),
        (Places(flat=True), (1, 12, 24, 24), 4 * 12 * (24 + 24)),
    ],
)
def test_tables_are_computed_of_what_they_were_computed_of(
    model: nn.Module, shape: tuple[int, ...], stored: int
) -> None:
    assert stored_bytes(model, torch.randn(shape)) <= stored + 16


@pytest.mark.parametrize("large", [-1e4, -1e9, -3e38])
def test_what_a_mask_stands_beside_is_no_rounding_of_the_mask(large: float) -> None:
    model = Function(lambda x: beside_mask(large, x))
    assert stored_bytes(model, torch.randn(128, 64)) >= 4 * 128 * 32


def test_halves_are_computed_of_half_of_each_row() -> None:
    x = torch.randn(1, 2, 128, 64).half()
    assert stored_bytes(Rotary().half(), x) <= 2 * 2 * 128 * 32 + 16
