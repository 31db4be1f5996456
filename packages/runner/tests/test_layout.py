"""Strides, dim orders and shapes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowerdeck.runner.values.layout import (
    dim_order_of,
    has_layout,
    is_contiguous_order,
    strides_of,
)

SHAPES = st.lists(st.integers(0, 4), max_size=5)


@given(SHAPES, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_tensor_made_with_the_strides_has_the_layout(sizes: list[int], random: object) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tensor = torch.empty_strided(sizes, strides_of(sizes, order))
    assert has_layout(tensor, order)
    if is_contiguous_order(order):
        assert tensor.is_contiguous()
    if 0 not in sizes and 1 not in sizes:
        assert list(dim_order_of(tensor)) == order


def test_other_layouts_are_told_apart() -> None:
    images = torch.empty(2, 3, 4, 5)
    last = images.to(memory_format=torch.channels_last)
    assert has_layout(images, (0, 1, 2, 3))
    assert not has_layout(images, (0, 2, 3, 1))
    assert has_layout(last, (0, 2, 3, 1))
    assert not has_layout(images[:, :, ::2], (0, 1, 2, 3))
    assert not has_layout(torch.empty(1).expand(3), (0,))


def test_dimensions_of_size_one_say_nothing() -> None:
    images = torch.empty(2, 1, 4, 4)
    assert has_layout(images, (0, 1, 2, 3))
    assert has_layout(images, (0, 2, 3, 1))
