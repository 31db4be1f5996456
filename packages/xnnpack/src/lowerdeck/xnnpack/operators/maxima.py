"""The largest number of each row, which the runtime finds as a pool over one image a row."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.types import IntLikeType as Dim

from lowerdeck.xnnpack.emit import Emission
from lowerdeck.xnnpack.payload.schema import NodeKind


def largest_of_rows(emission: Emission, value: int, shape: Sequence[Dim]) -> int:
    """Return the largest number along the last dimension, which stays with size 1.

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
