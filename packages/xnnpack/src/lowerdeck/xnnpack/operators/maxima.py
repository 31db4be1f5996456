"""The largest number of each row, and whether a row has any 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.types import IntLikeType as Dim

from lowerdeck.xnnpack.emit import Emission, resized
from lowerdeck.xnnpack.payload.schema import NodeKind


def largest_of_rows(emission: Emission, value: int, shape: Sequence[Dim]) -> int:
    """Return the largest number along the last dimension, which stays with size 1.

    The runtime finds it as a pool over one image a row.

    Args:
        emission: Where to add.
        value: The numbers, in the plain layout.
        shape: Their sizes; the last is a number, and at most one of the others is not.
    """
    width = int(shape[-1])
    if width == 1:
        return value
    rows = math.prod(shape[:-1])
    image = emission.reshaped(value, (rows, 1, width, 1))
    most = emission.add(
        NodeKind.MAX_POOLING_2D,
        (rows, 1, 1, 1),
        pooling_height=1,
        pooling_width=width,
        stride_height=1,
        stride_width=1,
        dilation_height=1,
        dilation_width=1,
        input_id=image,
    )
    return emission.reshaped(most, (*shape[:-1], 1))


def any_of_rows(emission: Emission, value: int, shape: Sequence[Dim]) -> int:
    """Return 1 for each row that has a 1, else 0; the last dimension stays with size 1.

    Args:
        emission: Where to add.
        value: Numbers that are 0 or 1, in the plain layout.
        shape: Their sizes, two or more, of which any may be symbolic.
    """
    *batch, rows, columns = shape
    # The average over the two dimensions before the last: over the columns, and over 1.
    wide = resized(emission, value, shape, (1, *shape))
    order = [*range(1, len(batch) + 1), len(shape), 0, len(shape) - 1]
    turned = emission.permuted(wide, order, (*batch, columns, 1, rows))
    share = emission.add(NodeKind.GLOBAL_AVG_POOLING_2D, (*batch, rows), input_id=turned)
    found = emission.add(
        NodeKind.MULTIPLY,
        (*batch, rows),
        output_range=(0.0, 1.0),
        input1_id=share,
        input2_id=emission.id_of(emission.scalar(2.0**40)),
    )
    return resized(emission, found, (*batch, rows), (*batch, rows, 1))
