"""Which sizes a line of the model asks for, as far as its text says."""

from __future__ import annotations

import re
from functools import lru_cache

DimsAsked = tuple[tuple[int | None, int | None], ...]
"""Dimensions as ranges, counted from the end where negative; () where no size is asked for."""

_ANY: DimsAsked = ((None, None),)

_RANK = re.compile(r"len\((?:\w+\.)*\w+\.(?:shape|size\(\))\)")
_ASKS = re.compile(
    r"\.shape\b(?:\[([^\[\]]*)\])?|\.size\((?:dim=)?([^()]*)\)|\b(len)\("
    r"|\bn(?:umel|element)\(|\b_*(?!re)\w*(?:shape|size)\w*\("
)
_INDEX = re.compile(r"\s*(-?\d+)\s*")
_RANGE = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")
_TENSOR = re.compile(r"(?<!\w)tensor\(")
_WRITTEN_TENSOR = re.compile(r"(?<!\w)tensor\([\s\d.,e+\-\[\]()]*(?:,\s*dtype|,\s*device|\)|$)")


@lru_cache(4096)
def dims_asked(line: str) -> DimsAsked:
    """Return which dimensions a line asks the size of, whatever tensor it asks.

    How many dimensions there are (``len(x.shape)``) is no size.
    """
    found: DimsAsked = ()
    for asked in _ASKS.finditer(_RANK.sub("", line)):
        text = "0" if asked[3] else asked[1] or asked[2] or ""
        index, slice_ = _INDEX.fullmatch(text), _RANGE.fullmatch(text)
        if index:
            dim = int(index[1])
            found += ((dim, dim + 1 or None),)
        elif slice_:
            start, stop = (int(each) if each else None for each in slice_.groups())
            found += ((start, stop),)
        else:
            return _ANY
    return found


def are_asked(dims: DimsAsked, dim: int, rank: int) -> bool:
    """Return whether a dimension of a tensor of so many dimensions is one of these."""
    return any(dim in range(rank)[start:stop] for start, stop in dims)


def tensors_written(line: str) -> bool:
    """Return whether a line makes tensors of the numbers alone that it writes."""
    made = len(_TENSOR.findall(line))
    return 0 < made <= len(_WRITTEN_TENSOR.findall(line))
