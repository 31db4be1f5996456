"""Values and memory of a program that is functionalized: which value aliases which memory.

It is torch's own model (``FunctionalTensorWrapper``): a memory has a base, a value shows it
through views. A write in place gives its memory a pending change; a view of the memory is
regenerated from the base with all changes when it is read next. The operators are those of torch's
functionalization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

PARENT = object()
"""Stands, among the arguments of a view, for what is viewed."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One view of a tensor.

    Attributes:
        target: The operator.
        args: Its arguments, with ``PARENT``; in a template with ``Slot`` for an input of the call.
        kwargs: Its keywords.
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
