"""Factors of merged dimensions: the sizes whose product a view's dimension is.

``images.flatten(2)`` has the sizes ``(b, c, h * w)`` and the factors ``((b,), (c,), (h, w))``. The
*unmerged* tensor has a dimension for each factor: here ``images``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch.fx import Node

from lowerdeck.torch_base import expression_of, varies

Sizes: TypeAlias = tuple[Any, ...]
Factors: TypeAlias = tuple[Sizes, ...]
"""For each dimension of a tensor, the sizes whose product it is."""

SEVERAL = 2
"""Fewest dynamic sizes for which a reshape cannot be delegated: it infers one."""


def only_factor(sizes: Sizes) -> int | None:
    """Return the position of the only factor other than 1 (0 without one); None if several."""
    places = [at for at, size in enumerate(sizes) if not is_one(size)]
    return (places or [0])[0] if len(places) <= 1 else None


def dynamic_factors_of(view: Node) -> Factors | None:
    """Return the factors of a view of several dynamic sizes; None unless it only merges sizes."""
    source: Any = view.args[0]
    before, after = shape_of(source), shape_of(view)
    if sum(map(varies, before)) < SEVERAL:
        return None
    return factor_view(before, after)


def factor_view(before: Sizes, after: Sizes) -> Factors | None:
    """Return the factors of a view's sizes, or None if it does not only merge sizes.

    Factors are sizes of the base. Static sizes may also be split or merged: ``(b, 8, w)`` viewed
    as ``(b * 2, 4 * w)`` has the factors ``((b, 2), (4, w))``.

    Args:
        before: The sizes of the base.
        after: The sizes of the view.
    """
    factors: list[Sizes] = []
    rest = list(before)
    for size in after:
        group: list[Any] = []
        total: Any = 1
        while not group or not is_equal(total, expression_of(size)):
            if not rest and not is_one(size):
                return None
            # Sizes of 1 may be inserted.
            factor = 1 if is_one(size) and not (rest and is_one(rest[0])) else rest.pop(0)
            missing = _quotient(expression_of(size), total) if isinstance(factor, int) else 1
            if 1 < missing < factor and factor % missing == 0:
                rest.insert(0, factor // missing)
                factor = missing
            total = total * expression_of(factor)
            if group and isinstance(group[-1], int) and isinstance(factor, int):
                factor *= group.pop()
            group.append(factor)
        factors.append(tuple(group))
    if not factors or not all(map(is_one, rest)):
        return None
    factors[-1] = (*factors[-1], *rest)
    return tuple(factors) if len(flat_sizes(tuple(factors))) > len(after) else None


def merged_dims(before: Sizes, after: Sizes) -> list[list[int]] | None:
    """Return the dimensions of a view's base that each of its dimensions merges.

    Unlike in ``factor_view`` no size is split, inserted or dropped: the result is None for other
    views.

    Args:
        before: The sizes of the base.
        after: The sizes of the view.
    """
    groups: list[list[int]] = []
    dims = iter(range(len(before)))
    for size in after:
        groups.append([])
        total: Any = 1
        while not groups[-1] or not is_equal(total, expression_of(size)):
            dim = next(dims, None)
            if dim is None:
                return None
            groups[-1].append(dim)
            total = total * expression_of(before[dim])
    return None if [*dims] else groups


def _quotient(product: Any, divisor: Any) -> int:
    """Return the quotient if it is an integer for all values of the symbols, else 1."""
    if isinstance(product, int):
        divides = isinstance(divisor, int) and product % divisor == 0
        return product // divisor if divides else 1
    quotient = product / divisor
    return int(quotient) if quotient.is_Integer else 1


def flat_sizes(factors: Factors) -> Sizes:
    """Return the sizes of the unmerged tensor."""
    return tuple(size for factor in factors for size in factor)


def flat_dims(factors: Factors) -> list[list[int]]:
    """Return the dimensions of the unmerged tensor that each dimension merges."""
    dims = iter(range(sum(map(len, factors))))
    return [[next(dims) for _ in factor] for factor in factors]


def drop_ones(factors: Factors) -> Factors:
    """Return factors without sizes of 1 beside only one other size.

    Sizes of 1 among several others stay: ConvBert's windows are products only if merged.
    """
    places = map(only_factor, factors)
    return tuple(
        factor if place is None else (factor[place],)
        for factor, place in zip(factors, places, strict=True)
    )


def removable_ones(factors: Factors) -> list[int]:
    """Return the dimensions that ``drop_ones`` drops."""
    places = map(only_factor, factors)
    return [
        dim
        for place, dims in zip(places, flat_dims(factors), strict=True)
        for at, dim in enumerate(dims)
        if place not in (None, at)
    ]


def unmerged_factors(node: Node) -> Factors:
    """Return the factors of a tensor whose dimensions are not merged: its sizes."""
    return tuple((size,) for size in shape_of(node))


def shape_of(node: Any) -> Sizes:
    """Return the sizes of a node's tensor."""
    return tuple(node.meta["val"].shape)


def with_size_at(shape: Sizes, axis: int, size: int) -> Sizes:
    """Return a shape with ``size`` inserted at ``axis``."""
    return (*shape[:axis], size, *shape[axis:])


def is_one(size: Any) -> bool:
    """Return whether a size is statically 1."""
    return isinstance(size, int) and size == 1


def is_like(left: Node, other: Node) -> bool:
    """Return whether two nodes have equal sizes."""
    return equal_sizes(shape_of(left), shape_of(other))


def equal_sizes(left: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether shapes are equal for all values of their symbols."""
    return len(left) == len(other) and all(
        is_equal(expression_of(a), expression_of(b)) for a, b in zip(left, other, strict=True)
    )


def is_equal(left: Any, other: Any) -> bool:
    """Return whether two expressions are equal for all values of their symbols."""
    if left is other or left == other:
        return True
    if isinstance(left, int) and isinstance(other, int):
        return False
    return _symbols(left) == _symbols(other) and bool((left - other).expand() == 0)


def _symbols(expression: Any) -> Any:
    return getattr(expression, "free_symbols", set())
