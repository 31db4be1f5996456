"""Tensors as images of height and width, with their pools and padding.

Lines of one dimension are images of one row; so are rows of which the largest number is sought.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from torch.fx import Node
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnNode, XnnOperator
from lowerdeck.xnnpack.emit import (
    Call,
    Emission,
    Fields,
    Range,
    Tracked,
    pair,
    shape_of,
    symbols_refusal,
)
from lowerdeck.xnnpack.payload.layout import Layout

Pair: TypeAlias = tuple[int, int]


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


def pool(
    emission: Emission,
    kind: XnnOperator,
    value: int,
    shape: Sequence[Dim],
    *,
    kernel: Pair,
    stride: Pair = (1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    dilation: Pair = (1, 1),
    limits: Range | None = None,
) -> int:
    """Return the pool of an image.

    Args:
        emission: Where to add.
        kind: Which pool.
        value: The image.
        shape: The result's sizes, as torch counts them.
        kernel: Sizes of a window.
        stride: Steps from window to window.
        padding: At top, right, bottom and left.
        dilation: Steps between the elements of a window.
        limits: Least and greatest result.
    """
    top, right, bottom, left = padding
    return emission.add(
        kind,
        shape,
        Layout.CHANNELS_LAST,
        limits,
        padding_top=top,
        padding_right=right,
        padding_bottom=bottom,
        padding_left=left,
        pooling_height=kernel[0],
        pooling_width=kernel[1],
        stride_height=stride[0],
        stride_width=stride[1],
        dilation_height=dilation[0],
        dilation_width=dilation[1],
        input_id=value,
    )


def mean_of_images(
    emission: Emission,
    value: int,
    shape: Sequence[Dim],
    layout: Layout = Layout.PLAIN,
    *,
    keep: bool = True,
) -> int:
    """Return the mean over height and width, the second and third dimension of memory.

    Args:
        emission: Where to add.
        value: The images.
        shape: The result's sizes, as torch counts them in a layout.
        layout: The layout.
        keep: Whether height and width stay, with size 1.
    """
    flags = XnnNode.KEEP_DIMS if keep else 0
    return emission.add(
        XnnOperator.GLOBAL_AVG_POOLING_2D, shape, layout, input_id=value, flags=flags
    )


def padded(
    emission: Emission,
    value: int,
    shape: Sequence[Dim],
    before: Sequence[int],
    after: Sequence[int],
    layout: Layout = Layout.PLAIN,
    number: float | None = None,
) -> int:
    """Return a value with numbers added around it.

    Args:
        emission: Where to add.
        value: What to pad.
        shape: The result's sizes, as torch counts them in a layout.
        before: How many numbers precede each dimension of memory.
        after: How many follow it.
        layout: The layout.
        number: The number, 0 if None.
    """
    fields: dict[str, Fields] = {} if number is None else {"padding_value": number}
    return emission.add(
        XnnOperator.STATIC_CONSTANT_PAD,
        shape,
        layout,
        None,
        pre_paddings=tuple(before),
        post_paddings=tuple(after),
        input_id=value,
        **fields,
    )


def largest_of_rows(emission: Emission, tensor: Tracked) -> Tracked:
    """Return the largest number along the last dimension, which stays with size 1.

    Args:
        emission: Where to add.
        tensor: The numbers; the last size is fixed, and at most one of the others is not.
    """
    *kept, width = tensor.shape
    if width == 1:
        return tensor
    rows = math.prod(kept)
    image = emission.reshaped(emission.id_of(tensor), (rows, 1, width, 1))
    most = pool(
        *(emission, XnnOperator.MAX_POOLING_2D, image, (rows, 1, 1, 1)), kernel=(1, int(width))
    )
    shape = (*kept, 1)
    return emission.tracked(shape, emission.reshaped(most, shape))


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
    return symbols_refusal(shape)
