"""Reshapes with several symbolic sizes; the runtime's reshape infers only one.

Symbolic sizes keep their order, and static sizes between them are split or merged, as for heads of
attention: ``[batch, tokens, 64]`` to ``[batch, tokens, 4, 16]``. A broadcast multiplication adds a
dimension of size 1, and an average drops two of them; slices split static dimensions, and
concatenations merge them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnGraph, XnnOperator
from lowerdeck.xnnpack.emit.arguments import is_fixed, is_one, same_sizes
from lowerdeck.xnnpack.emit.emission import Emission
from lowerdeck.xnnpack.emit.tensors import Tracked
from lowerdeck.xnnpack.emit.values import Fields
from lowerdeck.xnnpack.payload import Layout

_MOST_PIECES = 64
"""Maximum number of slices of a dimension; each is a node and a copy."""


def reshape_refusal(before: Sequence[Dim], after: Sequence[Dim]) -> str | None:
    """Return why XNNPACK cannot reshape a tensor, or None."""
    if sum(not is_fixed(size) for size in after) <= 1:
        return None
    plan = _plan(before, after)
    if plan is None:
        return "it has several symbolic sizes, of which a reshape infers only one"
    if len(before) + plan.added > XnnGraph.MAX_RANK or plan.pieces > _MOST_PIECES:
        return (
            "it has several symbolic sizes, and reshaping them takes too many slices or dimensions"
        )
    return None


def resized(emission: Emission, tensor: Tracked, after: Sequence[Dim]) -> Tracked:
    """Return a tensor with other sizes, which ``reshape_refusal`` allows.

    Args:
        after: The sizes of the result, which has the plain layout.
    """
    before = tensor.shape
    plan = _plan(before, after)
    if plan is None or sum(not is_fixed(size) for size in after) <= 1:
        return emission.view(tensor, after)
    value = emission.id_of(tensor)
    with emission.stored(emission.reads, emission.encoding_of(value)):
        moved = _Tensor(emission, value, list(before), _keys(before))
        if plan.added:
            moved.add_ones(plan.added)
        for number, (old, new) in enumerate(plan.groups):
            if old != new:
                for _ in old[1:]:
                    moved.merge(number)
                for place, size in enumerate(new[:-1]):
                    moved.split((number, place), int(size))
        return emission.tracked(after, moved.arranged(after, dropped=plan.dropped))


_Key = tuple[int, int]
"""Sort key of a dimension: its group and its position in the group."""


class _Plan(NamedTuple):
    """Steps of a reshape.

    Attributes:
        groups: The sizes other than 1 of each group, before and after. A group is one symbolic
            size, or the static sizes between two symbolic ones.
        added: Number of dimensions of size 1 added first.
        dropped: Number of dimensions dropped at the end.
        pieces: Largest number of slices of a dimension.
    """

    groups: list[tuple[list[Dim], list[Dim]]]
    added: int
    dropped: int
    pieces: int


def _plan(before: Sequence[Dim], after: Sequence[Dim]) -> _Plan | None:
    """Return the steps of a reshape, or None if it is not supported."""
    old, new = _grouped(before), _grouped(after)
    if len(old) != len(new):
        return None
    groups = list(zip(old, new, strict=True))
    spare = sum(map(is_one, before)) - sum(map(is_one, after))
    pieces = 0
    for left, right in groups:
        if all(map(is_fixed, [*left, *right])):
            if prod(left) != prod(right):
                return None
            if left != right:
                # A merge leaves a dimension of size 1; a split consumes one.
                spare += len(left) - len(right)
                pieces = max(pieces, *map(int, left[:-1]), *map(int, right[:-1]), 0)
        elif not same_sizes(left, right):
            return None
    added = max(-spare, 0) if spare < 0 else spare % 2
    return _Plan(groups, added, spare + added, pieces)


def _grouped(shape: Sequence[Dim]) -> list[list[Dim]]:
    """Return the groups of sizes other than 1; each symbolic size is a separate group."""
    groups: list[list[Dim]] = [[]]
    for size in shape:
        if not is_fixed(size):
            groups += [[size], []]
        elif not is_one(size):
            groups[-1].append(size)
    return groups


def _keys(shape: Sequence[Dim]) -> list[_Key | None]:
    """Return the key of each dimension; None where its size is 1."""
    keys: list[_Key | None] = []
    group = place = 0
    for size in shape:
        if not is_fixed(size):
            keys.append((group + 1, 0))
            group, place = group + 2, 0
        elif is_one(size):
            keys.append(None)
        else:
            keys.append((group, place))
            place += 1
    return keys


@dataclass(slots=True)
class _Tensor:
    """A value during a reshape, with a key or None for each dimension."""

    emission: Emission
    value: int
    shape: list[Dim]
    keys: list[_Key | None]

    def add_ones(self, count: int) -> None:
        """Add dimensions of size 1 in front."""
        self.shape[:0] = [1] * count
        self.keys[:0] = [None] * count
        unit = self.emission.constant_value(torch.ones([1] * len(self.shape)))
        self.value = self.emission.add(
            XnnOperator.MULTIPLY, self.shape, input1_id=self.value, input2_id=unit
        )

    def merge(self, group: int) -> None:
        """Merge the first two dimensions of a group."""
        first, second = (self.keys.index(key) for key in sorted(self._of_group(group))[:2])
        self._join(self._slices(first, int(self.shape[first]), 1), second)
        self.keys[first], self.keys[second] = None, self.keys[first]

    def split(self, key: _Key, count: int) -> None:
        """Split a dimension in two, the first of size ``count``."""
        at, free = self.keys.index(key), self.keys.index(None)
        self._join(self._slices(at, count, int(self.shape[at]) // count), free)
        self.keys[at], self.keys[free] = (key[0], key[1] + 1), key

    def arranged(self, after: Sequence[Dim], dropped: int) -> int:
        """Return the value with the sizes ``after``, dropping ``dropped`` dimensions of size 1."""
        ones = (at for at, key in enumerate(self.keys) if key is None)
        real = iter(sorted(key for key in self.keys if key is not None))
        order = [next(ones) if is_one(size) else self.keys.index(next(real)) for size in after]
        # An average drops the two dimensions before the last.
        order[-1:-1] = ones
        shape = [self.shape[at] for at in order]
        value = self.emission.permuted(self.value, order, shape)
        for _ in range(dropped // 2):
            del shape[-3:-1]
            value = self.emission.add(XnnOperator.GLOBAL_AVG_POOLING_2D, shape, input_id=value)
        return value

    def _of_group(self, group: int) -> list[_Key]:
        return [key for key in self.keys if key is not None and key[0] == group]

    def _slices(self, axis: int, count: int, size: int) -> list[Tracked]:
        tensor = self.emission.tracked(self.shape, self.value)
        # Size 0 selects a whole dimension.
        at = [int(position == axis) for position in range(len(self.shape))]
        sizes = [size * position for position in at]
        return [
            self.emission.part(tensor, [number * size * position for position in at], sizes)
            for number in range(count)
        ]

    def _join(self, parts: list[Tracked], axis: int) -> None:
        whole = joined(self.emission, parts, axis)
        self.value, self.shape = self.emission.id_of(whole), list(whole.shape)


def joined(
    emission: Emission, parts: Sequence[Tracked], axis: int, layout: Layout = Layout.PLAIN
) -> Tracked:
    """Concatenate tensors along a dimension."""
    shape = parts[0].shape
    sized_parts = [(emission.id_of(part, layout), part.shape[axis]) for part in parts]
    # The runtime concatenates up to five at a time; a tree copies fewer elements than a chain.
    while len(sized_parts) > 1:
        groups = [sized_parts[first : first + 5] for first in range(0, len(sized_parts), 5)]
        sized_parts = [_joined(emission, group, shape, axis, layout) for group in groups]
    ((value, size),) = sized_parts
    return emission.tracked((*shape[:axis], size, *shape[axis + 1 :]), value, layout)


def _joined(
    emission: Emission,
    parts: Sequence[tuple[int, Dim]],
    shape: Sequence[Dim],
    axis: int,
    layout: Layout,
) -> tuple[int, Dim]:
    if len(parts) == 1:
        return parts[0]
    size = sum(part[1] for part in parts)
    inputs: dict[str, Fields] = {
        f"input{number}_id": value for number, (value, _) in enumerate(parts, start=1)
    }
    value = emission.add(
        XnnOperator[f"CONCATENATE{len(parts)}"],
        (*shape[:axis], size, *shape[axis + 1 :]),
        layout,
        None,
        axis=layout.position(axis, len(shape)),
        **inputs,
    )
    return value, size
