"""Writes that a program of values loses.

``_foreach_add_`` and its like write one tensor after the other, and each step sees what those
before it wrote; made functional, all of them see what was there at first. So does a custom
operator that reads by another name what it has written. And what is written through a view must
leave what the view does not show as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.fx import GraphModule, Node

from lowerdeck.decompose.calls.memory import Value
from lowerdeck.decompose.calls.strides import fills
from lowerdeck.decompose.errors import DecomposeError
from lowerdeck.torch_base import (
    describe_node,
    hint_of,
    leaves_gaps,
    schema_of,
    unset_fake_temporarily,
    written_arguments,
    written_windows,
)

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Use:
    """One tensor among the arguments of a call.

    Attributes:
        value: What it is.
        tensor: What it was in the original program.
        step: Its position in a list; None for what is in none.
        writes: Whether it is written.
        early: Whether it may be written before the call has read what it is given.
    """

    value: Value
    tensor: torch.Tensor
    step: int | None
    writes: bool
    early: bool

    def spoils(self, other: _Use) -> bool:
        """Return whether what is written here is to be seen by another use, or lost by its write.

        Args:
            other: Another use of the same memory in the same call.
        """
        if self.early:
            at_risk = True
        elif self.step is None and other.step is None:
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
    target: Any = node.target
    if not schema_of(target).is_mutable:
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
                f"{node.name!r} ({node.target}) writes memory that it is also given by another "
                "name, or several tensors one after the other that overlap, which a program of "
                "values cannot tell: give it clones of what it reads, or write them one by one"
            )


def check_shown(target: Any, value: Value) -> None:
    """Refuse a write through views that have no inverse which keeps the other elements.

    Args:
        target: What writes.
        value: What it writes.

    Raises:
        DecomposeError: A view of it has none.
    """
    first, *others = [view.target is _ATEN.as_strided.default for view in value.views] or [False]
    if any(others) or (first and not fills(value.memory.base)):
        raise DecomposeError(
            f"{target} writes through an as_strided of a view, which may show elements that the "
            "view does not: call as_strided on the tensor that the view is of"
        )
    if any(leaves_gaps(view.source) for view in value.views):
        raise DecomposeError(
            f"{target} writes through an unfold whose windows leave gaps, in which torch's "
            "functionalisation writes zeros: take slices of the tensor"
        )


def check_windows(graph_module: GraphModule) -> None:
    """Refuse windows that leave gaps in memory that is written, which torch may write zeros to.

    Args:
        graph_module: Of a program that goes torch's way.

    Raises:
        DecomposeError: It has some. They may be read alone, which only a walk tells.
    """
    for node in written_windows(graph_module):
        raise DecomposeError(
            f"{describe_node(node)}: its windows leave gaps, in which torch's functionalisation "
            "writes zeros where something is written through them: take slices of the tensor"
        )


def _uses(node: Node, args: Any, kwargs: Any) -> Iterator[_Use]:
    target: Any = node.target
    written = written_arguments(target)
    # Torch lets a custom operator write copies; it reads what was there before.
    is_custom = not schema_of(target).name.startswith("aten::")
    for index, argument in enumerate(schema_of(target).arguments):
        source: Any = node.args[index] if index < len(args) else node.kwargs.get(argument.name)
        given = args[index] if index < len(args) else kwargs.get(argument.name)
        writes = argument.name in written
        if isinstance(given, Value):
            yield _Use(given, source.meta["val"], None, writes, writes and is_custom)
        elif isinstance(given, (tuple, list)):
            for step, (each, value) in enumerate(zip(source, given, strict=True)):
                if isinstance(value, Value):
                    yield _Use(value, each.meta["val"], step, writes, writes and is_custom)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and _where(one) == _where(other)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two views of one memory share a byte, or may: that is told by hints."""
    this, that = _where(one), _where(other)
    if this is None or that is None:
        return True
    if max(this[0], that[0]) >= min(_end(*this), _end(*that)):
        return False
    with unset_fake_temporarily():
        touched = torch.zeros(max(_end(*this), _end(*that)), dtype=torch.bool, device="cpu")
        _view(touched, *this).fill_(True)
        return bool(_view(touched, *that).any())


def _view(touched: torch.Tensor, first: int, sizes: list[int], strides: list[int]) -> torch.Tensor:
    return touched.as_strided(sizes, strides, first)


_Place = tuple[int, list[int], list[int]]


def _where(tensor: torch.Tensor) -> _Place | None:
    """Return the first byte of a tensor, and sizes and strides in bytes; None where unknown."""
    width = tensor.dtype.itemsize
    numbers = [hint_of(n) for n in (tensor.storage_offset(), *tensor.shape, *tensor.stride())]
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
