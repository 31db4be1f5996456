"""Let calls hand values to each other through the state that eager kept them in.

In a functional program the second call of a counter takes the first call's count from the first
call. In eager it took it from the buffer. Writing the buffer after each call makes all calls
alike, and keeps arguments of preserved calls what they were. It is right whatever eager did: the
buffer is free between two writes, since only its last value is ever seen again.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from lowerdeck.unflatten.trace.call_tree import CallTree, Frame, frames_around
from lowerdeck.unflatten.trace.flat_items import Item
from lowerdeck.unflatten.trace.module_paths import ModulePaths
from lowerdeck.unflatten.trace.mutations import Mutation, Mutations, aliases_of, end_of_call


@dataclass(slots=True)
class _Context:
    items: Sequence[Item]
    tree: CallTree
    paths: ModulePaths
    index: Mapping[Node, int]
    calls: Mapping[str, int]
    given: Mapping[str, Container[str]]

    def frame_of(self, node: Node) -> Frame | None:
        position = self.index.get(node)
        return None if position is None else self.tree.frame_of[self.items[position]]


def carry_through_state(
    plan: Mutations,
    items: Sequence[Item],
    tree: CallTree,
    paths: ModulePaths,
    index: Mapping[Node, int],
    given: Mapping[str, Container[str]],
) -> None:
    """Add the writes and reads to ``plan`` by which calls hand values on through state.

    Args:
        plan: The last write of everything mutated; changed.
        items: The program's steps.
        tree: The calls around them.
        paths: The modules.
        index: The position of each node's item.
        given: The names of what each call is given whose signature is known, by the call's name.
    """
    calls: dict[str, int] = {}
    for frame in tree.frames():
        name = paths.canonical(frame.path)
        calls[name] = calls.get(name, 0) + 1
    context = _Context(items, tree, paths, index, calls, given)
    for mutation in list(plan.all):
        if mutation.frame.parent is None or mutation.clone_value:
            continue
        _read_after(plan, context, mutation, len(items))
        plan.final[mutation.value] = mutation.target
        if calls[paths.canonical(mutation.frame.path)] > 1:
            _write_before(plan, context, mutation)


def _write_before(plan: Mutations, context: _Context, last: Mutation) -> None:
    """Add the writes of earlier calls of the same module, from the last one to the first."""
    old_readers = [
        context.index[user]
        for node in aliases_of(last.target)
        for user in node.users
        if user in context.index
    ]
    later = last
    while True:
        value = _handed_on(context, later)
        if value is None:
            return
        frame = _call_around(context, value, last.frame)
        if frame is None:
            return
        made = context.index[value]
        after = end_of_call(context.items, context.tree, made, frame)
        if after >= later.after or any(position > after for position in old_readers):
            return
        earlier = Mutation(last.spec, value, last.target, frame, after, False)
        if not _read_after(plan, context, earlier, later.after):
            return
        plan.after.setdefault(after, []).append(earlier)
        later = earlier


def _handed_on(context: _Context, write: Mutation) -> Node | None:
    """Return the one value from an earlier call of the same module that ``write`` was made of."""
    wanted = _layout(write.target)
    name = context.paths.canonical(write.frame.path)
    found: set[Node] = set()
    seen, queue = {write.value}, [write.value]
    while queue:
        for source in queue.pop().all_input_nodes:
            caller = context.frame_of(source)
            if source in seen or caller is None:
                continue
            seen.add(source)
            if _is_under(caller, write.frame):
                queue.append(source)
            elif _layout(source) == wanted and any(
                context.paths.canonical(frame.path) == name for frame in frames_around(caller)
            ):
                found.add(source)
    if len(found) > 1:
        # An operator may hand on several values of one layout: take the one of
        # the same operator and index.
        found = {source for source in found if _origin(source) == _origin(write.value)}
    return found.pop() if len(found) == 1 else None


def _origin(node: Node) -> object:
    return (node.target, node.args[1:]) if node.target is operator.getitem else node.target


def _read_after(plan: Mutations, context: _Context, write: Mutation, end: int) -> bool:
    """Let the readers outside of the writing call read state; return whether all of them can."""
    reads: dict[tuple[int, Node], Node] = {}
    for user in write.value.users:
        position = context.index.get(user)
        if position is None or _is_under(
            context.tree.frame_of[context.items[position]], write.frame
        ):
            continue
        around = frames_around(context.tree.frame_of[context.items[position]])
        if any(write.value.name in context.given.get(frame.call_name, ()) for frame in around):
            continue
        views = aliases_of(user)
        last = max(
            (context.index.get(reader, end) for view in views for reader in view.users),
            default=position,
        )
        # The step after which the next write happens still reads what was there before.
        if position <= write.after or position > end or (len(views) > 1 and last > end):
            return False
        reads[position, write.value] = write.target
    plan.through_state.update(reads)
    return True


def _call_around(context: _Context, node: Node, like: Frame) -> Frame | None:
    name = context.paths.canonical(like.path)
    around = context.frame_of(node)
    for frame in frames_around(around) if around is not None else ():
        if context.paths.canonical(frame.path) == name and frame is not like:
            return frame
    return None


def _is_under(frame: Frame, ancestor: Frame) -> bool:
    while frame.depth > ancestor.depth and frame.parent is not None:
        frame = frame.parent
    return frame is ancestor


def _layout(node: Node) -> object:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return (tuple(value.shape), value.dtype, value.device)
