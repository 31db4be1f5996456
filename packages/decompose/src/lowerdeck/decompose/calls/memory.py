"""Values and memory of a program that is functionalized: which value aliases which memory.

It is torch's own model (``FunctionalTensorWrapper``): a memory has a base, a value shows it
through views. A write in place gives its memory a pending change; a view of the memory is
regenerated from the base with all changes when it is read next. The operators are those of torch's
functionalization.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

_ATEN = torch.ops.aten

PARENT = object()
"""Stands, among the arguments of a view, for what is viewed."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One way to see a tensor.

    Attributes:
        target: The operator.
        args: Its arguments, with ``PARENT``.
        kwargs: Its keywords.
        index: Which of several results; None where there is one.
        source: The node of the original program that made it.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int | None
    source: Node

    def alone(self) -> View:
        """Return the same view by an operator that gives it by itself, where there is one.

        From torch 2.15 on, that is how one of several views is regenerated.
        """
        if self.index is None or self.kwargs or not _are_numbers(self.args[1:]):
            return self
        parent, *rest = self.args
        args: tuple[Any, ...]
        if self.target is _ATEN.unbind.int:
            args = (parent, rest[0] if rest else 0, self.index)
            return replace(self, target=_ATEN.select.int, args=args, index=None)
        if self.target is _ATEN.split.Tensor:
            bounds = self.index * rest[0], (self.index + 1) * rest[0]
        elif self.target is _ATEN.split_with_sizes.default:
            start = sum(rest[0][: self.index])
            bounds = start, start + rest[0][self.index]
        else:
            return self
        args = (parent, rest[1] if len(rest) > 1 else 0, *bounds)
        return replace(self, target=_ATEN.slice.Tensor, args=args, index=None)

    def inverse_view(self, shape: Sequence[Any]) -> View:
        """Return the view by which a write to this one is inverse_view, of the same elements.

        torch undoes one of several by itself, as if an operator gave it alone.

        Args:
            shape: Of what is viewed.
        """
        alone = self.alone()
        if alone is self:
            return self
        parent, dim, first, *past = alone.args
        dim %= len(shape)
        if past and not isinstance(shape[dim], int):
            return self
        return replace(alone, args=(parent, dim, first, *(min(end, shape[dim]) for end in past)))


def _are_numbers(tree: Any) -> bool:
    if isinstance(tree, (tuple, list)):
        return all(map(_are_numbers, tree))
    return isinstance(tree, int)


@dataclass(slots=True, eq=False)
class Memory:
    """What values share.

    Attributes:
        base: The node of all of it.
        generation: How often it was written.
        pending: Changes that the base does not have yet: what was written, through which views,
            and by which node of the original program.
        hidden: Whether values show it in ways that views do not tell.
    """

    base: Node
    generation: int = 0
    pending: list[tuple[Node, tuple[View, ...], Node]] = field(default_factory=list)
    hidden: bool = False


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of the original program.

    Attributes:
        node: The node that it is, as of ``generation``.
        memory: What it shows.
        views: How, the first view first.
        generation: The generation of the memory that the node has.
        requires_grad: Whether it is a parameter, or a view of one.
    """

    node: Node
    memory: Memory
    views: tuple[View, ...] = ()
    generation: int = 0
    requires_grad: bool = False

    @classmethod
    def fresh(cls, node: Node) -> Value:
        """Return a value with memory of its own.

        Args:
            node: What it is.
        """
        return cls(node, Memory(node))

    @property
    def is_current(self) -> bool:
        """Return whether the node has all that was written."""
        return self.generation == self.memory.generation

    def write(self, node: Node, source: Node) -> None:
        """Let the value be ``node``, and all that show its memory be changed by it.

        Args:
            node: What it is now.
            source: The node of the original program that writes it.
        """
        # The node may have other strides than a view of the base has, so that even the value
        # itself is regenerated when it is read.
        self.memory.pending.append((node, self.views, source))
        self.memory.generation += 1
