"""Which module call computed each node: ``nn_module_stack`` read as a tree of calls."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.fx import Node

from lowerdeck.unflatten._torch_private import EMPTY_STACK_KEY, TRACEPOINT
from lowerdeck.unflatten.trace.call_tree import CallTree, Frame, common_ancestor
from lowerdeck.unflatten.trace.flat_items import (
    Item,
    Role,
    Scope,
    mode_arguments,
    unpacks,
)
from lowerdeck.unflatten.trace.mode_borders import settle_borders
from lowerdeck.unflatten.trace.module_paths import ModulePaths

_CALL_INDEX = re.compile(r"@([0-9]{1,18})\Z")

Step = tuple[str, int, str | None]
"""One entry of a module stack: path, index of the call, name of the type."""


def build_call_tree(items: list[Item], paths: ModulePaths) -> CallTree:
    """Return the tree of calls with the frame of each item.

    Nodes are not yet entered into ``Frame.nodes``: passes may still add some.

    Args:
        items: The program's steps; mode regions that several calls share are divided.
        paths: The modules of the program, for stacks that name a module through another owner.
    """
    root = Frame("", 0, None, 0, _root_type(items))
    builder = _Builder(paths, CallTree(root, {}))
    missing: list[Item] = []
    marked: dict[Node, tuple[Step, ...]] = {}
    for item in items:
        steps = module_stack(item.node, paths)
        if steps is None:
            missing.append(item)
            continue
        if item.node.target is TRACEPOINT:
            # The caller comes by it, in the caller's mode.
            marked[item.node] = steps
            steps = steps[:-1]
        builder.tree.frame_of[item] = builder.enter(steps)
    builder.tree.marked.update(
        (node, builder.known[steps]) for node, steps in marked.items() if steps in builder.known
    )
    unheard = (steps[-1][0] for steps in marked.values() if steps and steps not in builder.known)
    builder.tree.unheard.update(dict.fromkeys(unheard))
    _adopt(builder.tree, items, missing)
    _close_where_opened(builder.tree, items)
    settle_borders(builder.tree, items)
    return builder.tree


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
                    # The owner of this module is not on the stack, as where a module calls itself:
                    # its nodes stay with the caller, which makes the calls that it makes.
                    self.tree.called_elsewhere.setdefault(path)
                    continue
                frame = self._call(frame, inner, (path, index, type_name))
            found = self.known[steps] = frame
        return found

    def _call(self, parent: Frame, path: str, step: Step) -> Frame:
        recorded, index, type_name = step
        key = (parent, path, index)
        frame = self.calls.get(key)
        if frame is None:
            frame = Frame(path, index, parent, parent.depth + 1, type_name, recorded)
            parent.children.append(frame)
            self.calls[key] = frame
        return frame


def _close_where_opened(tree: CallTree, items: Iterable[Item]) -> None:
    """Let the call that begins a level of vmap, or of another transform, end it.

    Strict export gives the end to whoever called. Called alone, the call would leave torch in
    that level.
    """
    opened: list[Item] = []
    for item in items:
        name = getattr(item.node.target, "__name__", "")
        if name.endswith("_increment_nesting"):
            opened.append(item)
        elif name.endswith("_decrement_nesting") and opened:
            tree.frame_of[item] = tree.frame_of[opened.pop()]


def _adopt(tree: CallTree, items: Iterable[Item], missing: Sequence[Item]) -> None:
    """Give items without a stack to the innermost call that holds all their neighbours.

    Neighbours are the next ones whose call is known: a pass may have added several nodes in a row.
    Those in a region of another mode are some too: export asks for all sizes before the first.
    """
    lost = {item.node for item in missing if item.role is Role.COMPUTE}
    flow = _Flow(items if lost else ())
    before: dict[Node, Frame | None] = {}
    for item in missing:
        if item.role is not Role.COMPUTE:
            tree.frame_of[item] = tree.root
            continue
        before[item.node] = _around(tree, flow.sources(item), lost, before)
    after: dict[Node, Frame | None] = {}
    for item in reversed(missing):
        if item.role is Role.COMPUTE:
            users = _around(tree, flow.users(item), lost, after)
            after[item.node] = users
            tree.frame_of[item] = _common([before[item.node], users]) or tree.root


class _Flow:
    """Who reads whose values, as if mode regions had no borders.

    Args:
        items: The program's steps.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        self._opener: dict[Scope, Item] = {}
        self._inner: dict[tuple[Scope, Node], Scope] = {}
        for item in items:
            if item.role is Role.ENTER and item.inner is not None:
                self._opener[item.inner] = item
                self._inner[item.scope, item.node] = item.inner

    def users(self, item: Item) -> Iterator[tuple[Scope, Node]]:
        """Yield who reads what ``item`` computes."""
        queue = [(item.scope, item.node)]
        for scope, node in queue:
            for user in node.users:
                inner = self._inner.get((scope, user))
                opener = self._opener.get(scope)
                if inner is not None:
                    names = inner.module.graph.find_nodes(op="placeholder")
                    given = zip(names, mode_arguments(user)[2], strict=True)
                    queue += [(inner, name) for name, operand in given if operand is node]
                elif user.op == "output" and opener is not None:
                    places = [place for place, part in enumerate(_parts(user)) if part is node]
                    taken = (one for one in opener.node.users if unpacks(one))
                    queue += [(opener.scope, one) for one in taken if one.args[1] in places]
                else:
                    yield scope, user

    def sources(self, item: Item) -> Iterator[tuple[Scope, Node]]:
        """Yield what computes the values that ``item`` reads."""
        queue = [(item.scope, node) for node in item.node.all_input_nodes]
        for scope, node in queue:
            opener = self._opener.get(scope)
            taken: Any = node.args if unpacks(node) else (None, None)
            inner = self._inner.get((scope, taken[0]))
            found: Any = None
            if node.op == "placeholder" and opener is not None:
                names = list(scope.module.graph.find_nodes(op="placeholder"))
                found = (opener.scope, mode_arguments(opener.node)[2][names.index(node)])
            elif inner is not None:
                output = next(iter(inner.module.graph.find_nodes(op="output")))
                found = (inner, _parts(output)[taken[1]])
            # Where an attribute is read says nothing about who needs it.
            elif node.op != "get_attr":
                yield scope, node
            if found is not None and isinstance(found[1], Node):
                queue.append(found)


def _parts(output: Node) -> Sequence[Any]:
    parts: Any = output.args[0]
    return parts if isinstance(parts, (tuple, list)) else (parts,)


def _around(
    tree: CallTree,
    neighbours: Iterable[tuple[Scope, Node]],
    lost: Container[Node],
    passed: Mapping[Node, Frame | None],
) -> Frame | None:
    """Return the innermost call around the neighbours on one side, or None if there are none."""
    frames: list[Frame | None] = []
    for scope, node in neighbours:
        if node.op == "output":
            frames.append(tree.root)
        elif node in lost:
            frames.append(passed.get(node))
        elif node in scope.items:
            frames.append(tree.frame_of.get(scope.items[node]))
    return _common(frames)


def _common(frames: Iterable[Frame | None]) -> Frame | None:
    found: Frame | None = None
    for frame in frames:
        if frame is not None:
            found = frame if found is None else common_ancestor(found, frame)
    return found
