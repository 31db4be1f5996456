"""What a line of the model asks of tensors, as far as its text says: which sizes, their rank."""

from __future__ import annotations

import re
from functools import lru_cache

from torch.fx import Node

from lowerdeck.torch_base import arguments_of
from lowerdeck.unflatten._torch_private import packet_name

DimsAsked = tuple[tuple[int | None, int | None, bool], ...]
"""Dimensions as ranges, counted from the end where negative, and whether a variable is asked,
which was there before the line; () where no size is asked for."""

ANY_DIM: DimsAsked = ((None, None, False),)

DIMENSION = re.compile(r"(start_|end_)?dim(s|ension|\d)?|axis|source|destination")
"""Names of arguments of operators that are dimensions."""

_RANK = re.compile(r"len\((?:\w+\.)*\w+\.(?:shape|size\(\))\)")
_ASKS_RANK = re.compile(rf"{_RANK.pattern}|\.ndim\b|\.(?:n?dim|ndimension)\(\)|\.\.\.")
_INDEXES = {"select", "slice", "unsqueeze"}
"""What a subscript becomes, whose dimensions are counted from the first where it has no '...'."""

_NUMBER = re.compile(r"(?<![\w.])\d+\.?\d*(?:e[+-]?\d+)?|(?<![\w.])\.\d+", re.IGNORECASE)
_ASKS = re.compile(
    r"\.(?:shape\b|size\(\)(?=\[))(?:\[([^\[\]]*)\])?|\.size\((?:dim=)?([^()]*)\)|\b(len)\("
    r"|\bn(?:umel|element)\(|\b_*(?!re)\w*(?:shape|size)\w*\("
)
_NAME = re.compile(r"(?:\w+\.)*(?!m?[TH]\b)\w+")
_NAME_BEFORE = re.compile(rf"(?<![\w.)\]]){_NAME.pattern}$")
_INDEX = re.compile(r"\s*(-?\d+)\s*")
_RANGE = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")


@lru_cache(4096)
def dims_asked(line: str) -> DimsAsked:
    """Return which dimensions a line asks the size of, whatever tensor it asks.

    How many dimensions there are (``len(x.shape)``) is no size.
    """
    found: DimsAsked = ()
    line = _RANK.sub("", line)
    for asked in _ASKS.finditer(line):
        text = "0" if asked[3] else asked[1] or asked[2] or ""
        index, slice_ = _INDEX.fullmatch(text), _RANGE.fullmatch(text)
        is_variable = _is_variable(line, asked)
        if index:
            dim = int(index[1])
            found += ((dim, dim + 1 or None, is_variable),)
        elif slice_:
            start, stop = (int(each) if each else None for each in slice_.groups())
            found += ((start, stop, is_variable),)
        else:
            found += ((None, None, is_variable),)
    return found


def _is_variable(line: str, asked: re.Match[str]) -> bool:
    """Return whether a size is asked of what has a name, as ``y`` or ``self.bias``."""
    if asked[3]:  # len(
        found = _NAME.match(line, asked.end())
        return found is not None and line[found.end() : found.end() + 1] == ")"
    if not asked[0].startswith("."):
        return False
    before = _NAME_BEFORE.search(line, 0, asked.start())
    return before is not None


def are_asked(dims: DimsAsked, dim: int, rank: int, *, is_made_there: bool = False) -> bool:
    """Return whether a dimension of a tensor of so many dimensions is one of these.

    Args:
        dims: What a line asks for.
        dim: The dimension.
        rank: How many the tensor has.
        is_made_there: Whether the same line makes it: no variable has it there.
    """
    return any(
        dim in range(rank)[start:stop] and not (is_made_there and is_variable)
        for start, stop, is_variable in dims
    )


@lru_cache(4096)
def asks_rank(line: str) -> bool:
    """Return whether a line asks how many dimensions something has."""
    return _ASKS_RANK.search(line) is not None


def numbers_on(line: str) -> list[float]:
    """Return the numbers that a line writes."""
    return [float(text) for text in _NUMBER.findall(line)]


def has_unwritten_dims(node: Node, line: str) -> bool:
    """Return whether a step is given a dimension that may come of the number of these.

    Args:
        node: The call of an operator.
        line: The model's line that calls it.
    """
    if packet_name(node.target) in _INDEXES and "[" in line:
        return False
    every = arguments_of(node)
    given = {*list(every)[: len(node.args)], *node.kwargs}
    dims = [every[name] for name in given if DIMENSION.fullmatch(name)]
    flat = [dim for each in dims for dim in (each if isinstance(each, (tuple, list)) else [each])]
    positive = {dim for dim in flat if isinstance(dim, int) and dim >= 0}
    return bool(positive) and not positive.issubset(numbers_on(line))
