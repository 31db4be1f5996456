"""What a program overwrites: the plan of its writes as data, and facts about operators that write.

``write_back`` makes the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.export.graph_signature import OutputSpec
from torch.fx import Node

from lowerdeck.torch_base import returns_view
from lowerdeck.unflatten._torch_private import TRACEPOINT
from lowerdeck.unflatten.trace.call_tree import CallTree, Frame
from lowerdeck.unflatten.trace.flat_items import Item


@dataclass(frozen=True, slots=True, eq=False)
class Mutation:
    """One value to be written back.

    Attributes:
        spec: What the program says about it.
        value: The node that carries the new value.
        target: The placeholder that is overwritten.
        frame: The call that writes.
        after: Index of the item after which it writes; -1 for the start.
        clone_value: The value shares memory with something overwritten too: take a copy first.
    """

    spec: OutputSpec
    value: Node
    target: Node
    frame: Frame
    after: int
    clone_value: bool


@dataclass(slots=True)
class Mutations:
    """All of them.

    Attributes:
        specs: What comes before the user's outputs in the program's output.
        after: The mutations to be written after each item.
        returned: Outputs that would show the new value of something overwritten: copy them before.
        through_state: The placeholder to read, in place of an input, by index of the reader and
            the input: the value was written back before.
        final: The placeholder to read where a value is returned that was written back.
        inplace: Whether the graphs write; otherwise the new values are the first outputs.
    """

    count: int = 0
    all: list[Mutation] = field(default_factory=list)
    after: dict[int, list[Mutation]] = field(default_factory=dict)
    returned: list[Node] = field(default_factory=list)
    through_state: dict[tuple[int, Node], Node] = field(default_factory=dict)
    final: dict[Node, Node] = field(default_factory=dict)
    inplace: bool = True

    def keep_functional(self) -> None:
        """Leave every new value among the outputs; the outermost code writes them at its end."""
        self.inplace = False
        self.after.clear()
        self.through_state.clear()
        self.final.clear()


def aliases_of(node: Node) -> set[Node]:
    """Return ``node`` and everything that may be a view of it."""
    found, queue = {node}, [node]
    while queue:
        source = queue.pop()
        for user in source.users:
            views = [user] if returns_view(user.target) else behind_mark(user, source)
            queue.extend(view for view in views if view not in found)
            found.update(views)
    return found


def behind_mark(mark: Node, value: Node) -> list[Node]:
    """Return the nodes that are ``value`` behind the mark of a preserved call, if it is one."""
    if mark.target is not TRACEPOINT:
        return []
    return [user for user in mark.users if mark.args[user.args[1]] is value]  # type: ignore[index]


def end_of_call(items: Sequence[Item], tree: CallTree, after: int, frame: Frame) -> int:
    """Return the last item of the call, made by ``frame``, that holds item ``after``."""
    if after < 0:
        return after
    child = _child_of(tree.frame_of[items[after]], frame)
    if child is None:
        return after
    while after + 1 < len(items) and _child_of(tree.frame_of[items[after + 1]], frame) is child:
        after += 1
    return after


def _child_of(frame: Frame, ancestor: Frame) -> Frame | None:
    while frame is not ancestor:
        if frame.parent is ancestor or frame.parent is None:
            return frame
        frame = frame.parent
    return None
