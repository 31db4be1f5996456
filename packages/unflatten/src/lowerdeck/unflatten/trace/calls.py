"""Build the tree of module calls from ``nn_module_stack``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from lowerdeck.unflatten._torch_private import EMPTY_STACK_KEY, TRACEPOINT
from lowerdeck.unflatten.trace.names import ModulePaths
from lowerdeck.unflatten.trace.program import Item, Role

CALLED_ELSEWHERE = "is called by a module that does not own it, so the call is inlined there"

_CALL_INDEX = re.compile(r"@([0-9]{1,18})\Z")

Step = tuple[str, int, str | None]
"""Entry of a module stack: path, call index, type name."""


@dataclass(slots=True, eq=False)
class Frame:
    """One call of one module; compared by identity.

    Attributes:
        path: Full name of the module as the caller uses it; ``""`` for the root.
        index: Index of the call among those of that name, in execution order.
        parent: The calling frame; None for the root.
        depth: Number of enclosing frames.
        type_name: Qualified name of the eager module's type, or None.
        recorded: The module's name in the program, which may differ from ``path``.
        nodes: Nodes directly in the call, in order.
        children: Calls made by this one, in order.
    """

    path: str
    index: int
    parent: Frame | None
    depth: int
    type_name: str | None = None
    recorded: str = ""
    nodes: list[Node] = field(default_factory=list)
    children: list[Frame] = field(default_factory=list)

    @property
    def call_name(self) -> str:
        """Name of this call in the module call graph: ``path`` or ``path@index``."""
        path = self.recorded or self.path
        return f"{path}@{self.index}" if self.index else path

    @property
    def accessor(self) -> str:
        """Attribute path from the caller's module to this one."""
        if self.parent is None or not self.parent.path:
            return self.path
        return self.path[len(self.parent.path) + 1 :]

    def common(self, other: Frame) -> Frame:
        """Return the innermost frame that encloses this one and ``other``."""
        frame = self
        while frame is not other:
            if frame.depth >= other.depth and frame.parent is not None:
                frame = frame.parent
            elif other.parent is not None:
                other = other.parent
        return frame

    def around(self, outer: Frame | None = None) -> list[Frame]:
        """Return this frame and its enclosing frames inside ``outer``, innermost first."""
        frames = []
        frame: Frame | None = self
        while frame is not None and frame is not outer:
            frames.append(frame)
            frame = frame.parent
        return frames

    def all_nodes(self) -> list[Node]:
        """Return the nodes of this call and all calls below it."""
        if not self.children:
            return list(self.nodes)
        return [node for frame in self.below() for node in frame.nodes]

    def below(self) -> list[Frame]:
        """Return this frame and all calls below it, parents before their children."""
        frames = [self]
        for frame in frames:
            frames += frame.children
        return frames

    def first_node(self) -> Node | None:
        """Return the first node of this call or of a call below it."""
        return min((node for frame in self.below() for node in frame.nodes[:1]), default=None)


@dataclass(slots=True)
class CallTree:
    """All calls of a program.

    Attributes:
        root: The call of the outermost module.
        frame_of: The innermost call of each item.
        refusals: Modules with calls that cannot be replaced, with the reason.
    """

    root: Frame
    frame_of: dict[Item, Frame]
    refusals: dict[str, str] = field(default_factory=dict)

    def frames(self) -> list[Frame]:
        """Return every frame, parents before their children."""
        return self.root.below()

    def node_frames(self) -> dict[Node, Frame]:
        """Return the frame of each node in ``Frame.nodes``."""
        return {node: frame for frame in self.frames() for node in frame.nodes}

    def release(self) -> None:
        """Drop references to the program so that it can be freed."""
        for scope in {item.scope for item in self.frame_of}:
            scope.items.clear()
        self.frame_of.clear()


def build_call_tree(items: Sequence[Item], paths: ModulePaths) -> CallTree:
    """Return the tree of calls with the frame of each item.

    ``Frame.nodes`` are filled later.

    Args:
        paths: Module names, for stacks that name a module through another owner.
    """
    root = Frame("", 0, None, 0, _root_type(items))
    builder = _Builder(paths, CallTree(root, {}))
    tree = builder.tree
    without_stack: list[Item] = []
    for item in items:
        steps = module_stack(item.node, paths)
        if steps is None:
            without_stack.append(item)
            continue
        if item.node.target is TRACEPOINT:
            # It runs in the caller and the caller's mode.
            steps = steps[:-1]
        tree.frame_of[item] = builder.enter(steps)
    _adopt(tree, without_stack, items)
    return tree


def module_stack(node: Node, paths: ModulePaths) -> tuple[Step, ...] | None:
    """Return the calls around ``node`` without the root, or None if not recorded."""
    stack: Mapping[str, tuple[str, object]] | None = node.meta.get("nn_module_stack")
    if not stack or (len(stack) == 1 and EMPTY_STACK_KEY in stack):
        return None
    steps: list[Step] = []
    for key, (traced, type_) in stack.items():
        path = paths.eager(traced) if traced[:1] == "_" else traced
        if path:
            index = _call_index(key, traced) if "@" in key else 0
            steps.append((path, index, type_ if type(type_) is str else _name(type_)))
    return tuple(steps)


def _call_index(key: str, path: str) -> int:
    # In a module named "n@1", the key ends with the whole path.
    if key.endswith(path):
        return 0
    match = _CALL_INDEX.search(key)
    return int(match.group(1)) if match else 0


def _name(type_: object) -> str:
    if isinstance(type_, str):
        return type_
    return f"{getattr(type_, '__module__', '')}.{getattr(type_, '__qualname__', type_)}"


def _root_type(items: Iterable[Item]) -> str | None:
    for item in items:
        for path, type_ in item.node.meta.get("nn_module_stack", {}).values():
            if not path:
                return _name(type_)
    return None


class _Builder:
    def __init__(self, paths: ModulePaths, tree: CallTree) -> None:
        self.paths = paths
        self.tree = tree
        self.frames: dict[tuple[Step, ...], Frame] = {(): tree.root}
        self.calls: dict[tuple[Frame, str, int], Frame] = {}

    def enter(self, steps: tuple[Step, ...]) -> Frame:
        """Return the frame of a module stack, created if needed."""
        known = self.frames.get(steps)
        if known is not None:
            return known
        frame = self.tree.root
        for path, index, type_name in steps:
            inner = self.paths.under(frame.path, path)
            if inner is None:
                # The module's owner is not on the stack, for example in a recursive call: its
                # nodes stay in the caller.
                self.tree.refusals.setdefault(path, CALLED_ELSEWHERE)
                continue
            key = (frame, inner, index)
            child = self.calls.get(key)
            if child is None:
                child = Frame(inner, index, frame, frame.depth + 1, type_name, path)
                frame.children.append(child)
                self.calls[key] = child
            frame = child
        self.frames[steps] = frame
        return frame


def _adopt(tree: CallTree, items: Sequence[Item], all_items: Sequence[Item]) -> None:
    """Assign items without a module stack to the innermost call that encloses their neighbours.

    Neighbours are the nearest items with a stack, because a pass may add chains of nodes. A mode
    region is a neighbour of its operands.
    """
    regions = {item.node: item for item in (all_items if items else ()) if item.role is Role.ENTER}
    before: dict[Node, Frame | None] = {item.node: None for item in items}
    after = dict(before)

    def around(item: Item, nodes: Iterable[Node], passed: dict[Node, Frame | None]) -> None:
        frames: list[Frame] = []
        for node in nodes:
            if node.op == "output":
                frames.append(tree.root)
            elif node in passed:
                frames += [frame] if (frame := passed[node]) is not None else []
            elif node.op != "get_attr":
                neighbour = item.scope.items.get(node) or regions.get(node)
                if neighbour is not None and neighbour in tree.frame_of:
                    frames.append(tree.frame_of[neighbour])
        result = frames[0] if frames else None
        for frame in frames[1:]:
            result = frame if result is None else result.common(frame)
        passed[item.node] = result

    computing = [item for item in items if item.role is Role.COMPUTE]
    for item in items:
        if item.role is not Role.COMPUTE:
            tree.frame_of[item] = tree.root
    for item in computing:
        around(item, item.node.all_input_nodes, before)
    for item in reversed(computing):
        around(item, item.node.users, after)
        first, second = before[item.node], after[item.node]
        both = first.common(second) if first is not None and second is not None else None
        tree.frame_of[item] = both or first or second or tree.root
