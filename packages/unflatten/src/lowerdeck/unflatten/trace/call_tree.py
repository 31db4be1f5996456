"""The calls of a program as a tree."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from lowerdeck.unflatten.trace.flat_items import Item


@dataclass(slots=True, eq=False)
class Frame:
    """One call of one module; frames are compared by identity.

    Attributes:
        path: Name of the module as the caller knows it, from the root; ``""`` for the root.
        index: Which call of that name this is, from 0 in order of execution.
        parent: The call that made this one; None for the root.
        depth: Number of frames around this one.
        type_name: Qualified name of the eager module's type, or None.
        recorded: The name under which the program records the module's call, where it is another.
        part: 0, or the number of the piece where one call had to be split.
        nodes: What is directly in the call, in order.
        children: The calls made by this one, in order.
    """

    path: str
    index: int
    parent: Frame | None
    depth: int
    type_name: str | None = None
    recorded: str = ""
    part: int = 0
    nodes: list[Node] = field(default_factory=list)
    children: list[Frame] = field(default_factory=list)

    @property
    def call_name(self) -> str:
        """The name that the module call graph gives to this call: ``path`` or ``path@index``."""
        path = self.recorded or self.path
        return f"{path}@{self.index}" if self.index else path

    @property
    def accessor(self) -> str:
        """The attribute path from the caller's module to this one's."""
        if self.parent is None or not self.parent.path:
            return self.path
        return self.path[len(self.parent.path) + 1 :]


@dataclass(slots=True)
class CallTree:
    """All calls of a program.

    Attributes:
        root: The call of the outermost module.
        frame_of: The innermost call around each item.
        marked: The call that each of export's marks in the graph is of.
        unheard: Modules with marks of a call that computes nothing, so that it is none here.
        unsure: Calls of which nobody can tell whether they or their callers switch autocast on.
        lost: Calls that read, beside their arguments, what decomposing gave to their callers.
        called_elsewhere: Modules that some caller does not hold, so that it makes their calls
            itself.
    """

    root: Frame
    frame_of: dict[Item, Frame]
    marked: dict[Node, Frame] = field(default_factory=dict)
    unheard: dict[str, None] = field(default_factory=dict)
    unsure: set[Frame] = field(default_factory=set)
    lost: set[Frame] = field(default_factory=set)
    called_elsewhere: dict[str, None] = field(default_factory=dict)

    def frames(self) -> list[Frame]:
        """Return every frame, parents before their children."""
        found = [self.root]
        for frame in found:
            found.extend(frame.children)
        return found


def common_ancestor(first: Frame, second: Frame) -> Frame:
    """Return the innermost frame that holds both."""
    while first is not second:
        if first.depth >= second.depth and first.parent is not None:
            first = first.parent
        elif second.parent is not None:
            second = second.parent
    return first


def frames_around(frame: Frame, outer: Frame | None = None) -> list[Frame]:
    """Return ``frame`` and the calls around it inside of ``outer``, the innermost first."""
    found = []
    around: Frame | None = frame
    while around is not None and around is not outer:
        found.append(around)
        around = around.parent
    return found


def release(tree: CallTree) -> None:
    """Take apart what refers to itself, and to the program, so that no collector need come."""
    for scope in {item.scope for item in tree.frame_of}:
        scope.items.clear()
    for frame in tree.frames():
        frame.parent = None
    tree.frame_of.clear()
    tree.marked.clear()
