"""Writes of one call to memory that it writes or reads again, which a program of values loses.

``_foreach_add_`` and its like write one tensor after the other, and each step sees what those
before it wrote; made functional, all of them see what was there at first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.decompose.errors import DecomposeError
from lowerdeck.decompose.facts import SYMBOLS
from lowerdeck.decompose.memory import Value
from lowerdeck.torch_base import schema_of, unset_fake_temporarily


@dataclass(frozen=True, slots=True)
class _Use:
    """One tensor among the arguments of a call.

    Attributes:
        value: What it is.
        tensor: What it was in the original program.
        step: Its position in a list; None for what is in none.
        writes: Whether it is written.
    """

    value: Value
    tensor: torch.Tensor
    step: int | None
    writes: bool

    def spoils(self, other: _Use) -> bool:
        """Return whether what is written here is to be seen by another use, or lost by its write.

        Args:
            other: Another use of the same memory in the same call.
        """
        if self.step is None and other.step is None:
            # What one kernel reads it was given: only writes come one after the other.
            at_risk = other.writes
        elif self.step is None or other.step is None:
            at_risk = True
        elif self.step == other.step:
            at_risk = other.writes or not _same(self.tensor, other.tensor)
        else:
            at_risk = self.step < other.step
        return at_risk and _overlap(self.tensor, other.tensor)


def check_writes(node: Node, args: Any, kwargs: Any) -> None:
    """Refuse a call that writes several tensors one after the other, where that can be told.

    Args:
        node: A call of an operator in the original program.
        args: Its arguments, as values.
        kwargs: Its keywords, likewise.

    Raises:
        DecomposeError: It writes what it writes or reads again.
    """
    if not schema_of(node.target).is_mutable:
        return
    # Lists have thousands of tensors, nearly all of them alone in their memory.
    by_memory: dict[int, list[_Use]] = {}
    for use in _uses(node, args, kwargs):
        by_memory.setdefault(id(use.value.memory), []).append(use)
    for uses in by_memory.values():
        if len(uses) < 2:
            continue
        written = [use for use in uses if use.writes]
        if any(one is not other and one.spoils(other) for one, other in product(written, uses)):
            raise DecomposeError(
                f"{node.name!r} ({node.target}) writes tensors one after the other that overlap "
                "in memory, which a program of values cannot tell: write them one by one"
            )


def _uses(node: Node, args: Any, kwargs: Any) -> Iterator[_Use]:
    for index, argument in enumerate(schema_of(node.target).arguments):
        source = node.args[index] if index < len(args) else node.kwargs.get(argument.name)
        given = args[index] if index < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        writes = alias is not None and alias.is_write
        if isinstance(given, Value):
            yield _Use(given, source.meta["val"], None, writes)  # type: ignore[union-attr]
        elif isinstance(given, (tuple, list)):
            for step, (each, value) in enumerate(zip(source, given, strict=True)):  # type: ignore[arg-type]
                if isinstance(value, Value):
                    yield _Use(value, each.meta["val"], step, writes)  # type: ignore[union-attr]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and _where(one) == _where(other)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two views of one memory share a byte, or may: that is told by hints."""
    places = _where(one), _where(other)
    if places[0] is None or places[1] is None:
        return True
    (first, sizes, strides), (second, *rest) = places
    begin, end = first, _end(*places[0])
    if not (max(begin, second) < min(end, _end(*places[1]))):
        return False
    with unset_fake_temporarily():
        touched = torch.zeros(max(end, _end(*places[1])), dtype=torch.bool, device="cpu")
        touched.as_strided(sizes, strides, first).fill_(True)
        return bool(touched.as_strided(*rest, second).any())


_Place = tuple[int, list[int], list[int]]


def _where(tensor: torch.Tensor) -> _Place | None:
    """Return the first byte of a tensor, and sizes and strides in bytes; None where unknown."""
    width = tensor.dtype.itemsize
    numbers = [_number(n) for n in (tensor.storage_offset(), *tensor.shape, *tensor.stride())]
    if any(number is None for number in numbers):
        return None
    known: list[Any] = numbers
    rank = tensor.dim()
    strides = [stride * width for stride in known[1 + rank :]]
    return known[0] * width, [*known[1 : 1 + rank], width], [*strides, 1]


def _end(first: int, sizes: list[int], strides: list[int]) -> int:
    if 0 in sizes:
        return first
    return first + 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))


def _number(number: Any) -> int | None:
    """Return a size, or what a symbol was when the program was made; None where nobody knows."""
    if isinstance(number, SYMBOLS):
        hint: int | None = number.node.hint
        return hint
    return int(number)
