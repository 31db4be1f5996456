"""Writes that a program of values loses.

``_foreach_add_`` and its like write one tensor after the other, and each step sees what those
before it wrote; made functional, all of them see what was there at first. So does a custom
operator that reads by another name what it has written. And what is written through a view must
leave what the view does not show as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.fx import GraphModule, Node

from lowerdeck.decompose.calls.memory import Value
from lowerdeck.decompose.calls.strides import fills
from lowerdeck.decompose.errors import DecomposeError
from lowerdeck.torch_base import (
    MemoryUse,
    OpOverload,
    arguments_of,
    describe_node,
    graphs_of,
    hint_of,
    leaves_gaps,
    pytree,
    returns_view,
    schema_of,
    unset_fake_temporarily,
    written_arguments,
    written_windows,
)

_ATEN = torch.ops.aten
_ONE_BY_ONE = _ATEN.masked_scatter_.default


@dataclass(frozen=True, slots=True)
class _Use:
    """One tensor among the arguments of a call.

    Attributes:
        memory: What stands for its memory.
        tensor: What it was in the original program.
        step: Its position in a list; None for what is in none.
        writes: Whether it is written.
        early: Whether it may be written before the call has read what it is given.
    """

    memory: object
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
    if schema_of(target).is_mutable:
        _check_uses(node, _uses(node, args, kwargs, _memory_of))


def _memory_of(value: Any) -> object:
    return value.memory if isinstance(value, Value) else None


def _check_uses(node: Node, found: Iterator[_Use]) -> None:
    # Lists have thousands of tensors, nearly all of them alone in their memory.
    by_memory: dict[int, list[_Use]] = {}
    for use in found:
        by_memory.setdefault(id(use.memory), []).append(use)
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
    for view in value.views:
        if _shows_again(view.source):
            raise _repeated(view.source)
    if any(leaves_gaps(view.source) for view in value.views):
        raise DecomposeError(
            f"{target} writes through an unfold whose windows leave gaps, in which torch's "
            "functionalisation writes zeros: take slices of the tensor"
        )


def check_functional(graph_module: GraphModule) -> None:
    """Refuse what torch's functionalisation loses of a program without a word.

    Args:
        graph_module: Of a program that goes torch's way.

    Raises:
        DecomposeError: Windows leave gaps in memory that is written, although they may be read
            alone, which only a walk tells; something is written through memory that shows again,
            or that the call is also given by another name.
    """
    for gm in graphs_of(graph_module):
        memory = MemoryUse(gm.graph, gm)
        for node in gm.graph.nodes:
            if not isinstance(node.target, OpOverload):
                continue
            if _shows_again(node) and _is_written_through(node):
                raise _repeated(node)
            if schema_of(node.target).is_mutable:
                _check_uses(node, _uses(node, node.args, node.kwargs, partial(_group, memory)))
    for node in written_windows(graph_module):
        raise DecomposeError(
            f"{describe_node(node)}: its windows leave gaps, in which torch's functionalisation "
            "writes zeros where something is written through them: take slices of the tensor"
        )


def _group(memory: MemoryUse, given: Any) -> object:
    return memory.group(given) if isinstance(given, Node) else None


def _shows_again(node: Node) -> bool:
    """Return whether ``as_strided`` shows an element more than once, or may."""
    if node.target is not _ATEN.as_strided.default:
        return False
    place = _where(node.meta["val"])
    if place is None:
        return True
    first, sizes, strides = place
    long = sorted((step, size) for size, step in zip(sizes, strides, strict=True) if size > 1)
    last = 0
    for step, size in long:
        if step <= last:
            break
        last += step * (size - 1)
    else:
        return False
    with unset_fake_temporarily():
        places = torch.arange(_end(*place), device="cpu").as_strided(sizes, strides, first)
        return bool((places.flatten().sort().values.diff() == 0).any())


def _is_written_through(node: Node) -> bool:
    """Return whether a view, or a view of it, is written."""
    waiting = [node]
    for shown in waiting:
        for user in shown.users:
            target: Any = user.target
            if target is operator.getitem:
                waiting.append(user)
            if not isinstance(target, OpOverload):
                continue
            if returns_view(target):
                waiting.append(user)
                continue
            given = arguments_of(user)
            if any(shown in pytree.tree_leaves(given[name]) for name in written_arguments(target)):
                return True
    return False


def _repeated(node: Node) -> DecomposeError:
    return DecomposeError(
        f"{describe_node(node)} shows an element of its memory more than once, and something is "
        "written through it, which a program of values cannot tell: clone it before the write"
    )


def _uses(
    node: Node, args: Any, kwargs: Any, memory_of: Callable[[Any], object]
) -> Iterator[_Use]:
    target: Any = node.target
    written = written_arguments(target)
    # Torch lets a custom operator write copies; it reads what was there before. So do kernels that
    # take one element of what they are given for each that they write.
    early = not schema_of(target).name.startswith("aten::") or target is _ONE_BY_ONE
    for index, argument in enumerate(schema_of(target).arguments):
        source: Any = node.args[index] if index < len(args) else node.kwargs.get(argument.name)
        given = args[index] if index < len(args) else kwargs.get(argument.name)
        writes = argument.name in written
        if memory_of(given) is not None:
            yield _Use(memory_of(given), source.meta["val"], None, writes, writes and early)
        elif isinstance(given, (tuple, list)):
            for step, (each, value) in enumerate(zip(source, given, strict=True)):
                memory = memory_of(value)
                if memory is not None:
                    yield _Use(memory, each.meta["val"], step, writes, writes and early)


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
