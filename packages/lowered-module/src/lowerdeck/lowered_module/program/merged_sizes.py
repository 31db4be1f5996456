"""Sizes that views merge: for each dimension, the sizes whose product it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch.fx import Node

from lowerdeck.torch_base import expression_of, varies

Sizes: TypeAlias = tuple[Any, ...]
Parts: TypeAlias = tuple[Sizes, ...]
"""For each dimension of a tensor, the sizes that it is the product of."""

SEVERAL = 2
"""From how many dynamic sizes on a view is spared."""


def only_part(sizes: Sizes) -> int | None:
    """Return the only part of a dimension that is not 1."""
    places = [at for at, size in enumerate(sizes) if not is_one(size)]
    return (places or [0])[0] if len(places) <= 1 else None


def sizes_merged_by(view: Node) -> Parts | None:
    """Return the sizes that a view merges, if some are dynamic and it does nothing else."""
    source: Any = view.args[0]
    before, after = shape_of(source), shape_of(view)
    if sum(map(varies, before)) < SEVERAL:
        return None
    return merged_sizes(before, after)


def merged_sizes(before: Sizes, after: Sizes) -> Parts | None:
    """Return the factors of each size of a view; None for other views.

    They are sizes of the view's base, of which static ones may be split or merged.
    """
    groups: list[Sizes] = []
    rest = list(before)
    for size in after:
        group: list[Any] = []
        total: Any = 1
        while not group or not is_equal(total, expression_of(size)):
            if not rest and not is_one(size):
                return None
            # Sizes of 1 may be inserted.
            part = 1 if is_one(size) and not (rest and is_one(rest[0])) else rest.pop(0)
            missing = _quotient(expression_of(size), total) if isinstance(part, int) else 1
            if 1 < missing < part and part % missing == 0:
                rest.insert(0, part // missing)
                part = missing
            total = total * expression_of(part)
            if group and isinstance(group[-1], int) and isinstance(part, int):
                part *= group.pop()
            group.append(part)
        groups.append(tuple(group))
    if not groups or not all(map(is_one, rest)):
        return None
    groups[-1] = (*groups[-1], *rest)
    return tuple(groups) if len(flat_sizes(tuple(groups))) > len(after) else None


def dims_merged(before: Sizes, after: Sizes) -> list[list[int]] | None:
    """Return the dimensions that a view merges into each of its own; None for other views."""
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


def _quotient(product: Any, factor: Any) -> int:
    """Return the number by which a factor of a size is multiplied, or 1 if it is no factor."""
    if isinstance(product, int):
        is_factor = isinstance(factor, int) and product % factor == 0
        return product // factor if is_factor else 1
    quotient = product / factor
    return int(quotient) if quotient.is_Integer else 1


def flat_sizes(parts: Parts) -> Sizes:
    """Return all parts in one list."""
    return tuple(size for part in parts for size in part)


def without_ones(parts: Parts) -> Parts:
    """Return parts without sizes of 1 beside others."""
    kept = (tuple(size for size in part if not is_one(size)) or part[:1] for part in parts)
    return tuple(kept)


def spare_ones(parts: Parts) -> list[int]:
    """Return which sizes are 1 and merged into others, if nothing else is merged."""
    spare: list[int] = []
    for part, numbers in zip(parts, numbered(parts), strict=True):
        place = only_part(part)
        if place is None:
            return []
        spare += [number for at, number in enumerate(numbers) if at != place]
    return spare


def numbered(parts: Parts) -> list[list[int]]:
    """Return the positions of the parts of each dimension in one list."""
    numbers = iter(range(sum(map(len, parts))))
    return [[next(numbers) for _ in part] for part in parts]


def whole_parts(node: Node) -> Parts:
    """Return the sizes of a node's tensor, each as one part."""
    return tuple((size,) for size in shape_of(node))


def shape_of(node: Any) -> Sizes:
    """Return the sizes of a node's tensor."""
    return tuple(node.meta["val"].shape)


def with_size_at(shape: Sizes, axis: int, size: int) -> Sizes:
    """Return a shape with one more size."""
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
