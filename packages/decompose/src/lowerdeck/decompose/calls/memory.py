"""Aliases of a program that is functionalized.

The model is torch's (``FunctionalTensorWrapper``): a memory has a base, and values are views of
it. An in-place write adds a pending write to its memory. A view is regenerated from the base, with
all writes applied, when it is read next. The operators are those of torch's functionalization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

PARENT = object()
"""The viewed tensor, among the arguments of a view."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One view of a tensor.

    Attributes:
        args: Its arguments, with ``PARENT``; in a template with ``Slot`` for an input of the call.
        index: Which of several results; None where there is one.
        source: The node of the original program that made it; None in a template.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int | None
    source: Any = None


@dataclass(slots=True, eq=False)
class Memory:
    """Memory that values alias.

    Attributes:
        base: The node of the whole memory.
        generation: The number of writes so far.
        pending: Writes that the base does not have yet: new value, views through which it is
            written, and the original node that writes.
        hidden: Whether a value may alias it in an unknown way.
    """

    base: Node
    generation: int = 0
    pending: list[tuple[Node, tuple[View, ...], Node]] = field(default_factory=list)
    hidden: bool = False


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of the original program.

    Attributes:
        node: Its node, as of ``generation``.
        memory: The memory that it aliases.
        views: The chain of views from the base, outermost last.
        generation: The number of writes that the node has.
        requires_grad: Whether it is a parameter, or a view of one.
    """

    node: Node
    memory: Memory
    views: tuple[View, ...] = ()
    generation: int = 0
    requires_grad: bool = False

    @classmethod
    def fresh(cls, node: Node) -> Value:
        """Return a value that aliases no other."""
        return cls(node, Memory(node))

    @property
    def is_current(self) -> bool:
        """Return whether the node has all writes."""
        return self.generation == self.memory.generation

    def write(self, node: Node, source: Node) -> None:
        """Replace the elements of the value, and of all that alias it.

        Args:
            source: The original node that writes.
        """
        # The node may have other strides than a view of the base has, so that even the value
        # itself is regenerated when it is read.
        self.memory.pending.append((node, self.views, source))
        self.memory.generation += 1
