"""Which module call computed each node: ``nn_module_stack`` read as a tree of calls."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from lowerdeck.unflatten._torch_private import EMPTY_STACK_KEY
from lowerdeck.unflatten.flat_items import Item, Role
from lowerdeck.unflatten.module_paths import ModulePaths

_CALL_INDEX = re.compile(r"@(\d+)$")


@dataclass(slots=True, eq=False)
class Frame:
    """One call of one module; frames are compared by identity.

    Attributes:
        path: Name of the module as the caller knows it, from the root; ``""`` for the root.
        index: Which call of that name this is, from 0 in order of execution.
        parent: The call that made this one; None for the root.
        depth: Number of frames around this one.
        type_name: Qualified name of the eager module's type, or None.
        part: 0, or the number of the piece where one call had to be split.
        nodes: What stands directly in the call, in order.
        children: The calls made by this one, in order.
    """

    path: str
    index: int
    parent: Frame | None
    depth: int
    type_name: str | None = None
    part: int = 0
    nodes: list[Node] = field(default_factory=list)
    children: list[Frame] = field(default_factory=list)

    @property
    def call_name(self) -> str:
        """The name that the module call graph gives to this call: ``path`` or ``path@index``."""
        return f"{self.path}@{self.index}" if self.index else self.path

    @property
    def accessor(self) -> str:
        """The attribute path from the caller's module to this one's."""
        if self.parent is None or not self.parent.path:
            return self.path
        return self.path[len(self.parent.path) + 1 :]


Step = tuple[str, int, str | None]
"""One entry of a module stack: path, index of the call, name of the type."""


@dataclass(slots=True)
class CallTree:
    """All calls of a program.

    Attributes:
        root: The call of the outermost module.
        home: The frame in which each item stands.
    """

    root: Frame
    home: dict[Item, Frame]

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


def frames_around(frame: Frame) -> list[Frame]:
    """Return ``frame`` and the calls around it, the innermost first."""
    found = [frame]
    while found[-1].parent is not None:
        found.append(found[-1].parent)
    return found


def call_homes(items: Sequence[Item], paths: ModulePaths) -> CallTree:
    """Return the tree of calls with the home of each item.

    Nodes are not yet entered into ``Frame.nodes``: passes may still add some.

    Args:
        items: The program's steps.
        paths: The modules of the program, for stacks that name a module through another owner.
    """
    root = Frame("", 0, None, 0, _root_type(items))
    builder = _Builder(paths, CallTree(root, {}))
    missing: list[Item] = []
    for item in items:
        steps = module_stack(item.node, paths)
        if steps is None:
            missing.append(item)
        else:
            builder.tree.home[item] = builder.enter(steps)
    _adopt(builder.tree, missing)
    _settle_borders(builder.tree, items)
    return builder.tree


def release(tree: CallTree) -> None:
    """Take apart what refers to itself, and to the program, so that no collector need come."""
    for scope in {item.scope for item in tree.home}:
        scope.items.clear()
    for frame in tree.frames():
        frame.parent = None
    tree.home.clear()


def module_stack(node: Node, paths: ModulePaths) -> tuple[Step, ...] | None:
    """Return the calls around ``node`` without the root, or None if nobody recorded them."""
    stack: Mapping[str, tuple[str, object]] | None = node.meta.get("nn_module_stack")
    if not stack or (len(stack) == 1 and EMPTY_STACK_KEY in stack):
        return None
    return tuple(
        (
            path,
            _call_index(key, traced),
            type_name if isinstance(type_name, str) else _name(type_name),
        )
        for key, (traced, type_name) in stack.items()
        if (path := paths.eager(traced))
    )


def _call_index(key: str, path: str) -> int:
    # A module may itself be named "n@1": then the key ends with the whole path.
    if key.endswith(path):
        return 0
    found = _CALL_INDEX.search(key)
    return int(found.group(1)) if found else 0


def _name(type_: object) -> str:
    return f"{getattr(type_, '__module__', '')}.{getattr(type_, '__qualname__', type_)}"


def _root_type(items: Iterable[Item]) -> str | None:
    for item in items:
        for path, type_name in item.node.meta.get("nn_module_stack", {}).values():
            if not path:
                return type_name if isinstance(type_name, str) else _name(type_name)
    return None


class _Builder:
    def __init__(self, paths: ModulePaths, tree: CallTree) -> None:
        self.paths = paths
        self.tree = tree
        self.known: dict[tuple[Step, ...], Frame] = {(): tree.root}
        self.calls: dict[tuple[Frame, str, int], Frame] = {}

    def enter(self, steps: tuple[Step, ...]) -> Frame:
        found = self.known.get(steps)
        if found is None:
            frame = self.tree.root
            for path, index, type_name in steps:
                inner = self.paths.under(frame.path, path)
                if inner is None:
                    # The owner of this module is not on the stack: its nodes stay with the caller.
                    break
                frame = self._call(frame, inner, index, type_name)
            found = self.known[steps] = frame
        return found

    def _call(self, parent: Frame, path: str, index: int, type_name: str | None) -> Frame:
        key = (parent, path, index)
        frame = self.calls.get(key)
        if frame is None:
            frame = Frame(path, index, parent, parent.depth + 1, type_name)
            parent.children.append(frame)
            self.calls[key] = frame
        return frame


def _adopt(tree: CallTree, missing: Sequence[Item]) -> None:
    """Give items without a stack to the innermost call that holds all their neighbours.

    Neighbours are the next ones whose call is known: a pass may have added several nodes in a row.
    """
    lost = {item.node for item in missing if item.role is Role.COMPUTE}
    before: dict[Node, Frame | None] = {}
    for item in missing:
        if item.role is not Role.COMPUTE:
            tree.home[item] = tree.root
            continue
        # Where an attribute is read says nothing about who needs it.
        sources = (node for node in item.node.all_input_nodes if node.op != "get_attr")
        before[item.node] = _around(tree, item, sources, lost, before)
    after: dict[Node, Frame | None] = {}
    for item in reversed(missing):
        if item.role is Role.COMPUTE:
            users = _around(tree, item, item.node.users, lost, after)
            after[item.node] = users
            tree.home[item] = _common([before[item.node], users]) or tree.root


def _around(
    tree: CallTree,
    item: Item,
    neighbours: Iterable[Node],
    lost: Container[Node],
    passed: Mapping[Node, Frame | None],
) -> Frame | None:
    """Return the innermost call around the neighbours on one side, or None if there are none."""
    known = item.scope.items
    homes: list[Frame | None] = []
    for node in neighbours:
        if node.op == "output":
            homes.append(tree.root)
        elif node in lost:
            homes.append(passed.get(node))
        elif node in known:
            homes.append(tree.home.get(known[node]))
    return _common(homes)


def _common(frames: Iterable[Frame | None]) -> Frame | None:
    found: Frame | None = None
    for frame in frames:
        if frame is not None:
            found = frame if found is None else common_ancestor(found, frame)
    return found


def _settle_borders(tree: CallTree, items: Sequence[Item]) -> None:
    """Move the borders of mode regions into the calls that go on outside of them.

    Strict export gives each region to the outermost module. But a call of which a part runs in the
    region and a part does not has entered and left the mode itself.
    """
    opened: list[int] = []
    regions: list[tuple[int, int]] = []
    for place, item in enumerate(items):
        if item.role is Role.ENTER:
            opened.append(place)
        elif item.role is Role.EXIT:
            regions.append((opened.pop(), place))
    if not regions:
        return
    spans = _spans(tree, items)
    for enter, leave in regions:
        inside = [tree.home[item] for item in items[enter:leave] if item.role is Role.COMPUTE]
        if not inside:
            continue
        innermost = inside[0]
        for frame in inside[1:]:
            innermost = common_ancestor(innermost, frame)
        home = common_ancestor(tree.home[items[enter]], innermost)
        for frame in reversed(frames_around(innermost)):
            if frame.depth > home.depth and (spans[frame][0] < enter or spans[frame][1] > leave):
                home = frame
        tree.home[items[enter]] = tree.home[items[leave]] = home


def _spans(tree: CallTree, items: Sequence[Item]) -> dict[Frame, tuple[int, int]]:
    """Return the first and the last place at which each call computes something."""
    spans: dict[Frame, tuple[int, int]] = {}
    for place, item in enumerate(items):
        if item.role is Role.COMPUTE:
            for frame in frames_around(tree.home[item]):
                spans[frame] = (spans.get(frame, (place,))[0], place)
    return spans
