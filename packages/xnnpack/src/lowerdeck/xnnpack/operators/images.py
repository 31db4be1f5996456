"""Tensors as images of height and width: those of one dimension are images of one row."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node
from torch.types import IntLikeType as Dim

from lowerdeck.xnnpack.emit import Call, Emission, Tracked, is_fixed, pair, shape_of
from lowerdeck.xnnpack.payload.layout import Layout


def image_of(emission: Emission, tracked: Tracked) -> tuple[int, tuple[Dim, ...]]:
    """Return a tensor of 3 or 4 dimensions as an image, and its four sizes as torch counts them.

    Args:
        emission: Where to add.
        tracked: The tensor.
    """
    value = emission.id_of(tracked, Layout.CHANNELS_LAST)
    if len(tracked.shape) == 4:
        return value, tracked.shape
    batch, channels, length = tracked.shape
    return emission.reshaped(value, (batch, 1, length, channels)), image_sizes(tracked.shape)


def image_sizes(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the sizes that a tensor of 3 or 4 dimensions has as an image."""
    return tuple(shape) if len(shape) == 4 else (*shape[:2], 1, *shape[2:])


def define_image(emission: Emission, node: Node, value: int) -> None:
    """Say which image holds a node's result of 3 or 4 dimensions."""
    shape = shape_of(node)
    if len(shape) == 3:
        value = emission.reshaped(value, Layout.CHANNELS_LAST.arrange(shape))
    emission.define_value(node, value, Layout.CHANNELS_LAST)


def of_height_and_width(value: int | Sequence[int], rank: int, other: int) -> tuple[int, int]:
    """Return what an argument says of height and width.

    Args:
        value: The argument.
        rank: The dimensions of the tensor that it speaks of; of 3, it speaks of the width alone.
        other: What holds for the height then.
    """
    height, width = pair(value)
    return (other if rank == 3 else height, width)


def line_refusal(call: Call, name: str = "self") -> str | None:
    """Return why a tensor is no batch of lines that become images, or None."""
    shape = call.shape(name)
    if len(shape) != 3:
        return "its input needs 3 dimensions"
    if sum(not is_fixed(size) for size in shape) > 1:
        return "more than one symbolic size, which a reshape cannot carry"
    return None
