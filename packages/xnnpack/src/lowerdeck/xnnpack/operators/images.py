"""Tensors as images, with their pools.

1-D inputs are images of one row; so are rows reduced to their maximum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnNode, XnnOperator
from lowerdeck.xnnpack.emit import Call, Emission, Range, Tracked, is_fixed, symbols_refusal
from lowerdeck.xnnpack.payload import Layout


class Window(NamedTuple):
    """Kernel windows along one dimension; ``before`` and ``after`` are its padding."""

    kernel: int = 1
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1


def spatial(value: int | Sequence[int], rank: int, other: int) -> tuple[int, ...]:
    """Return the values of an argument by spatial dimension; 1-D inputs have a height of 1.

    Args:
        rank: Rank of the tensor; with 3, the argument applies to the width.
        other: Value for the height in that case.
    """
    values = [value] if isinstance(value, int) else list(value)
    values = values * (rank - 2) if len(values) == 1 else values
    return (other, *values) if rank == 3 else tuple(values)


def image_of(emission: Emission, tracked: Tracked) -> Tracked:
    """Return a tensor of 3 or 4 dimensions as images with channels last."""
    value = emission.id_of(tracked, Layout.CHANNELS_LAST)
    shape = image_sizes(tracked.shape)
    if len(tracked.shape) == 3:
        value = emission.reshaped(value, Layout.CHANNELS_LAST.arrange(shape))
    return emission.tracked(shape, value, Layout.CHANNELS_LAST)


def image_sizes(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the sizes of a tensor of 3 or 4 dimensions as an image."""
    return (*shape[:2], 1, *shape[2:]) if len(shape) == 3 else tuple(shape)


def from_image(emission: Emission, image: Tracked, shape: Sequence[Dim]) -> Tracked:
    """Return an image as a tensor of 3 to 5 dimensions."""
    value = image.ids[Layout.CHANNELS_LAST]
    if len(shape) != 4:
        value = emission.reshaped(value, Layout.CHANNELS_LAST.arrange(shape))
    return emission.tracked(shape, value, Layout.CHANNELS_LAST)


def pool(
    emission: Emission,
    kind: XnnOperator,
    image: Tracked,
    shape: Sequence[Dim],
    rows: Window,
    columns: Window,
    limits: Range | None = None,
) -> Tracked:
    """Return the pool of an image.

    Args:
        shape: Sizes of the result in torch's order.
        rows: The windows along the height.
        columns: The windows along the width.
        limits: Minimum and maximum of a fused clamp.
    """
    fields = window_fields(rows, columns, "pooling", "stride")
    return emission.unary(kind, image, limits, shape=shape, layout=Layout.CHANNELS_LAST, **fields)


def window_fields(rows: Window, columns: Window, kernel: str, stride: str) -> dict[str, int]:
    """Return the node fields for kernel windows.

    Args:
        rows: The windows along the height.
        columns: The windows along the width.
        kernel: Prefix of the names of the kernel sizes, before ``_height`` and ``_width``.
        stride: Prefix of the names of the strides.
    """
    fields = {"padding_top": rows.before, "padding_right": columns.after}
    fields |= {"padding_bottom": rows.after, "padding_left": columns.before}
    for side, window in (("height", rows), ("width", columns)):
        fields[f"{kernel}_{side}"] = window.kernel
        fields[f"{stride}_{side}"] = window.stride
        fields[f"dilation_{side}"] = window.dilation
    return fields


def mean_of_images(
    emission: Emission,
    value: int,
    shape: Sequence[Dim],
    layout: Layout = Layout.PLAIN,
    *,
    keep: bool = True,
) -> Tracked:
    """Return the mean over height and width, the second and third memory dimension.

    Args:
        value: The id of the images.
        shape: Sizes of the result in torch's order.
        keep: Whether to keep height and width with size 1.
    """
    flags = XnnNode.KEEP_DIMS if keep else 0
    kind = XnnOperator.GLOBAL_AVG_POOLING_2D
    mean = emission.add(kind, shape, layout, input_id=value, flags=flags)
    return emission.tracked(shape, mean, layout)


def largest_of_rows(emission: Emission, tensor: Tracked) -> Tracked:
    """Return the maximum along the last dimension, kept with size 1.

    Args:
        tensor: The tensor; the last size is static, and at most one other is symbolic.
    """
    *batch, width = tensor.shape
    if width == 1:
        return tensor
    rows = math.prod(batch)
    value = emission.reshaped(emission.id_of(tensor), (rows, 1, width, 1))
    image = emission.tracked((rows, 1, 1, width), value, Layout.CHANNELS_LAST)
    kind, window = XnnOperator.MAX_POOLING_2D, Window(int(width))
    most = pool(emission, kind, image, (rows, 1, 1, 1), Window(), window)
    shape = (*batch, 1)
    return emission.tracked(shape, emission.reshaped(most.ids[Layout.CHANNELS_LAST], shape))


def line_refusal(call: Call) -> str | None:
    """Return why a tensor cannot be treated as a batch of lines, or None."""
    shape = call.shape()
    if len(shape) != 3:
        return "its input needs 3 dimensions"
    return symbols_refusal(shape)


def volume_refusal(call: Call) -> str | None:
    """Return why the operand of a call is not a batch of volumes of static size, or None."""
    shape = call.shape()
    if len(shape) != 5:
        return f"its input has {len(shape)} dimensions; with a batch, 5 are needed"
    if not all(is_fixed(size) for size in shape[1:]):
        return "it has a symbolic size other than the batch size"
    return None
