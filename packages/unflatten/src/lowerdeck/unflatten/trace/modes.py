"""Assign the borders of mode regions to module calls.

A mode region is the part of a program between steps that enter and exit a mode, such as
``torch.no_grad()`` or autocast. Export puts each into a graph that the root calls. If a call is
only partly in a region, the region is split, so that each module enters and exits the mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

from lowerdeck.unflatten.trace.calls import CallTree, Frame
from lowerdeck.unflatten.trace.program import Item, Role, region_arguments

_Spans = Mapping[Frame, tuple[int, int]]


def place_mode_switches(tree: CallTree, items: list[Item]) -> None:
    """Move the borders of mode regions into the calls that switch the mode.

    Strict export attributes each region to the root, but a call that is partly inside a region
    must enter and exit the mode itself. Export also merges the end of a call that enables
    gradients with its caller's next steps into one region, which is split here.

    Args:
        tree: The call of each step; updated for added mode switches.
        items: The steps; mode switches that split a region are added.
    """
    _join_regions(tree, items)
    regions = list(_regions(items))
    if not regions:
        return
    spans = _spans(tree, items)
    added: dict[int, tuple[Item, Item]] = {}
    for enter, leave in regions:
        runs = _runs(tree, items, enter, leave, spans)
        if not runs:
            continue
        opener = items[enter]
        owners = [_owner(tree, items, opener, run, spans) for run in runs]
        tree.frame_of[opener], tree.frame_of[items[leave]] = owners[0], owners[-1]
        for number, run in enumerate(runs[1:], start=1):
            pause = Item(opener.node, opener.scope, Role.PAUSE, opener.inner)
            resume = Item(opener.node, opener.scope, Role.RESUME, opener.inner)
            tree.frame_of[pause], tree.frame_of[resume] = owners[number - 1], owners[number]
            added[run[0]] = (pause, resume)
    if added:
        items[:] = [
            step
            for position, item in enumerate(items)
            for step in (*added.get(position, ()), item)
        ]


def _join_regions(tree: CallTree, items: Sequence[Item]) -> None:
    """Merge adjacent regions of one mode by changing the roles of their shared borders.

    Export splits a region where a module re-enters the mode or switches another one. Regions that
    compute nothing are dropped the same way.
    """
    pairs = list(_regions(items))
    by_start = {enter: number for number, (enter, _) in enumerate(pairs)}

    def following(number: int) -> int | None:
        """Return the next adjacent region, skipping empty ones."""
        opener, position = items[pairs[number][0]], pairs[number][1] + 1
        while position < len(items):
            next_region = by_start.get(position)
            if items[position].role in {Role.PASS_IN, Role.PASS_OUT}:
                position += 1
            elif (
                next_region is None
                or _computes(items[position])
                or _same_mode(opener, items[position])
            ):
                return next_region
            else:
                position = pairs[next_region][1] + 1
        return None

    joined: set[int] = set()
    for number in sorted(range(len(pairs)), key=lambda number: pairs[number][0]):
        if number in joined:
            continue
        group = [number]
        while (second := following(group[-1])) is not None:
            third = following(second)
            numbers = (group[-1], second, second if third is None else third)
            if not _continues(tree, *(items[pairs[position][0]] for position in numbers)):
                break
            group.append(second)
        joined.update(group)
        borders = [items[position] for part in group for position in pairs[part]]
        if any(map(_computes, borders)):
            borders = borders[1:-1]
        for item in borders:
            item.role = Role.PASS_IN if item.role is Role.ENTER else Role.PASS_OUT


def _continues(tree: CallTree, first: Item, second: Item, third: Item) -> bool:
    """Return whether the mode of region ``first`` continues in its successor ``second``.

    Args:
        tree: The call of each step.
        third: Enter step of the region after ``second``, or ``second`` again.
    """
    if not _same_mode(first, second):
        return False
    outer, inner = tree.frame_of[first], tree.frame_of[second]
    if outer is inner:
        return True
    if outer.common(inner) is not outer:
        # Two calls that each enter the mode.
        return False
    # A call that is entered in this mode restores it at its end, which starts a third region.
    restored = third is not second and _same_mode(second, third) and tree.frame_of[third] is inner
    return restored or not _computes(first)


def _computes(border: Item) -> bool:
    return border.inner is not None and border.inner.computes


def _same_mode(first: Item, second: Item) -> bool:
    return (
        first.node.target is second.node.target
        and region_arguments(first.node)[0] == region_arguments(second.node)[0]
    )


def _regions(items: Sequence[Item]) -> Iterator[tuple[int, int]]:
    """Yield the border positions of each region, inner regions first."""
    opened: list[int] = []
    for position, item in enumerate(items):
        if item.role is Role.ENTER:
            opened.append(position)
        elif item.role is Role.EXIT:
            yield opened.pop(), position


def _runs(
    tree: CallTree, items: Sequence[Item], enter: int, leave: int, spans: _Spans
) -> list[tuple[int, int]]:
    """Split a region into parts such that no call crosses the border of its part.

    Calls that enclose the region do not count.
    """
    inside = [tree.frame_of[item] for item in items[enter:leave] if item.role is Role.COMPUTE]
    if not inside:
        return []
    around = reduce(lambda first, second: first.common(second), inside)

    def leaving(frame: Frame) -> Frame | None:
        """Return the innermost call around ``frame`` that continues outside the region."""
        while frame is not around and frame.parent is not None:
            if spans[frame][0] < enter or spans[frame][1] > leave:
                return frame
            frame = frame.parent
        return None

    starts: list[int] = []
    current: Frame | None = None
    depth = 0
    for position in range(enter + 1, leave):
        item = items[position]
        depth += {Role.ENTER: 1, Role.EXIT: -1}.get(item.role, 0)
        if item.role is not Role.COMPUTE:
            continue
        frame = leaving(tree.frame_of[item])
        if not starts:
            starts.append(enter + 1)
        elif frame is not current:
            if depth:
                # A nested region cannot be split with this one.
                return [(enter + 1, leave)]
            starts.append(position)
        current = frame
    return list(zip(starts, [*starts[1:], leave], strict=True))


def _owner(
    tree: CallTree, items: Sequence[Item], opener: Item, run: tuple[int, int], spans: _Spans
) -> Frame:
    """Return the call that enters the mode for a part of a region."""
    start, stop = run
    inside = [tree.frame_of[item] for item in items[start:stop] if item.role is Role.COMPUTE]
    innermost = reduce(lambda first, second: first.common(second), inside)
    owner = tree.frame_of[opener].common(innermost)
    for frame in reversed(innermost.around()):
        first, last = spans[frame]
        if frame.depth > owner.depth and (first < start or last >= stop):
            owner = frame
    return owner


def _spans(tree: CallTree, items: Sequence[Item]) -> dict[Frame, tuple[int, int]]:
    """Return the first and last position of each call."""
    spans: dict[Frame, tuple[int, int]] = {}
    for position, item in enumerate(items):
        if item.role is Role.COMPUTE:
            for frame in tree.frame_of[item].around():
                spans[frame] = (spans.get(frame, (position,))[0], position)
    return spans
