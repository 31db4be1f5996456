"""Alias tracking for functionalization.

As in torch's ``FunctionalTensorWrapper``, a memory has a base, and values are views of it. An
in-place op adds a pending write to the memory. Views are regenerated from the base at the next
read, with all writes applied, by the same operators as in torch's functionalization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

PARENT = object()
"""The viewed tensor in the arguments of a view."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """View of a tensor.

    Attributes:
        args: Arguments, with ``PARENT``, and in templates ``Slot`` for inputs of the call.
        index: Index of the result of a multi-output op, else None.
        source: Original node that created the view; None in templates.
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
        base: Node of the whole memory.
        generation: Number of writes so far.
        pending: Writes not yet applied to the base: new value, views written through, and original
            node.
        hidden: Whether a value may alias the memory in an unknown way.
    """

    base: Node
    generation: int = 0
    pending: list[tuple[Node, tuple[View, ...], Node]] = field(default_factory=list)
    hidden: bool = False


@dataclass(slots=True, eq=False)
class Value:
    """Tensor of the original program.

    Attributes:
        node: Node of the tensor after ``generation`` writes.
        views: Chain of views from the base.
        generation: Number of writes included in the node.
        requires_grad: Whether it is a parameter or a view of one.
    """

    node: Node
    memory: Memory
    views: tuple[View, ...] = ()
    generation: int = 0
    requires_grad: bool = False

    @classmethod
    def fresh(cls, node: Node) -> Value:
        """Return a value with new memory."""
        return cls(node, Memory(node))

    @property
    def is_current(self) -> bool:
        """Return whether the node includes all writes."""
        return self.generation == self.memory.generation

    def write(self, node: Node, source: Node) -> None:
        """Replace the elements of the value and its aliases.

        Args:
            source: Original node of the write.
        """
        # The value itself is regenerated too, because the node's strides may differ from a view's.
        self.memory.pending.append((node, self.views, source))
        self.memory.generation += 1
