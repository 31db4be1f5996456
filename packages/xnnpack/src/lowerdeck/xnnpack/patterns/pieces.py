"""Building blocks of patterns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.fx import Node

from lowerdeck.torch_base import OpOverload
from lowerdeck.xnnpack.operators.shapes import order_of
from lowerdeck.xnnpack.patterns.matching import AnyArg, Leaf, Match, Pattern, Piece, Viewed

_aten = torch.ops.aten
Arguments: TypeAlias = tuple[Any, ...]


class OperatorPattern(NamedTuple):
    """An operator and the pattern of its decomposition.

    Attributes:
        pieces: The pattern, ending with the call that returns the operator's result.
        arguments: Returns the operator's arguments; None if the match is not equivalent.
    """

    op: OpOverload
    pieces: Piece | Viewed
    arguments: Callable[[Match], Arguments | None]


class Prepared(NamedTuple):
    """An argument of a restored operator, computed by an additional call.

    Attributes:
        arguments: Arguments of the call, whose result has the shape of the first.
        dtype: The dtype of its result.
        name: Suffix to the operator's name.
    """

    op: OpOverload
    arguments: Arguments
    dtype: torch.dtype
    name: str


ADD = "add.Tensor add.Scalar"
MUL = "mul.Tensor mul.Scalar"
DIV = "div.Tensor div.Scalar"
VIEW = "view reshape _unsafe_view"
X, W, B = Leaf("x"), Leaf("w"), Leaf("b")
ANY = AnyArg()


def view(pattern: Pattern, name: str = "") -> Piece:
    """Return a pattern of a tensor viewed in any shape."""
    return Piece(VIEW, pattern, ANY, name=name)


def turned(pattern: Pattern, name: str) -> Pattern:
    """Return a pattern of a permuted tensor."""
    return (
        Piece("permute", pattern, ANY, name=name),
        Piece("transpose.int", pattern, ANY, ANY, name=name),
        Piece("t mT", pattern, name=name),
    )


def swaps_last_two(node: Node) -> bool:
    """Return whether a permutation swaps the last two dimensions."""
    order = order_of(node)
    return len(order) > 1 and order == [*range(len(order) - 2), len(order) - 1, len(order) - 2]
