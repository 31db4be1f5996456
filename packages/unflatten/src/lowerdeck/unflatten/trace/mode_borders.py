"""Where each mode region begins and ends: in the call that switches the mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from lowerdeck.unflatten._torch_private import AUTOCAST_REGION
from lowerdeck.unflatten.trace.call_tree import CallTree, Frame, common_ancestor, frames_around
from lowerdeck.unflatten.trace.flat_items import Item, Role, mode_arguments

_Spans = Mapping[Frame, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Run:
    """A part of a region.

    Attributes:
        start: Position of its first step.
        stop: Position after its last step.
    """

    start: int
    stop: int


def settle_borders(tree: CallTree, items: list[Item]) -> None:
    """Move the borders of mode regions into the calls that go on outside of them.

    Strict export gives each region to the outermost module. But a call of which a part runs in the
    region and a part does not has entered and left the mode itself. Export also makes one region
    of what a call computes after it switched gradients on and of what its caller computes next;
    that one is divided.

    Args:
        tree: The innermost call around each step; those of borders are changed.
        items: The steps; those that divide a region are added.
    """
    _join(tree, items)
    regions = list(_regions(items))
    if not regions:
        return
    spans = _spans(tree, items)
    added: dict[int, tuple[Item, Item]] = {}
    moved: set[Frame] = set()
    for enter, leave in regions:
        runs = _runs(tree, items, enter, leave, spans)
        if not runs:
            continue
        opener = items[enter]
        owners = [_owner(tree, items, opener, run, spans) for run in runs]
        if opener.node.target is AUTOCAST_REGION:
            moved.update(owner for owner in owners if owner is not tree.frame_of[opener])
        tree.frame_of[opener], tree.frame_of[items[leave]] = owners[0], owners[-1]
        for number, run in enumerate(runs[1:], start=1):
            pause = Item(opener.node, opener.scope, Role.PAUSE, opener.inner)
            resume = Item(opener.node, opener.scope, Role.RESUME, opener.inner)
            tree.frame_of[pause], tree.frame_of[resume] = owners[number - 1], owners[number]
            added[run.start] = (pause, resume)
    # Export breaks the caller's region where the call switches gradients: it looks like two.
    tree.unsure.update(frame for frame in moved if _always_autocast(tree, items, frame))
    if added:
        items[:] = [
            step
            for position, item in enumerate(items)
            for step in (*added.get(position, ()), item)
        ]


def _always_autocast(tree: CallTree, items: Sequence[Item], frame: Frame) -> bool:
    """Return whether everything that a call computes, it computes under autocast."""
    depth = 0
    for item in items:
        if item.node.target is AUTOCAST_REGION and item.role is not Role.COMPUTE:
            depth += {Role.ENTER: 1, Role.EXIT: -1}.get(item.role, 0)
        elif (
            item.role is Role.COMPUTE and not depth and frame in frames_around(tree.frame_of[item])
        ):
            return False
    return True


def _join(tree: CallTree, items: Sequence[Item]) -> None:
    """Let a mode stay on through regions of it that follow each other at once.

    Export breaks what runs in one mode where a module in it switches that mode on again, and
    where it switches another one. Regions in which nothing is computed switch nothing, either.

    Args:
        tree: The innermost call around each step.
        items: The steps; borders at which no mode changes get another role.
    """
    pairs = list(_regions(items))
    by_start = {enter: number for number, (enter, _) in enumerate(pairs)}

    def following(number: int) -> int | None:
        """Return the region that begins where this one ends, but for those that switch nothing."""
        opener, position = items[pairs[number][0]], pairs[number][1] + 1
        while position < len(items):
            found = by_start.get(position)
            if items[position].role in {Role.PASS_IN, Role.PASS_OUT}:
                position += 1
            elif (
                found is None or _computes(items[position]) or _same_mode(opener, items[position])
            ):
                return found
            else:
                position = pairs[found][1] + 1
        return None

    joined: set[int] = set()
    for number in sorted(range(len(pairs)), key=lambda number: pairs[number][0]):
        if number in joined:
            continue
        group = [number]
        while (second := following(group[-1])) is not None:
            third = following(second)
            numbers = (group[-1], second, second if third is None else third)
            if not _goes_on(tree, *(items[pairs[position][0]] for position in numbers)):
                break
            group.append(second)
        joined.update(group)
        borders = [items[position] for part in group for position in pairs[part]]
        if any(map(_computes, borders)):
            borders = borders[1:-1]
        for item in borders:
            item.role = Role.PASS_IN if item.role is Role.ENTER else Role.PASS_OUT


def _goes_on(tree: CallTree, one: Item, two: Item, three: Item) -> bool:
    """Return whether the mode that ``one`` switches on stays on in ``two``, which follows at once.

    Args:
        tree: The innermost call around each step.
        one: The opener of a region.
        two: The opener of the next one.
        three: The opener of the one after that, or again ``two``.
    """
    if not _same_mode(one, two):
        return False
    outer, inner = tree.frame_of[one], tree.frame_of[two]
    if outer is inner:
        return True
    if common_ancestor(outer, inner) is not outer:
        # Two calls, each of which switches the mode on for itself.
        return False
    # A call that finds the mode on puts it back at the end, which begins one more region.
    restored = three is not two and _same_mode(two, three) and tree.frame_of[three] is inner
    return restored or not _computes(one)


def _computes(border: Item) -> bool:
    return border.inner is not None and border.inner.computes


def _same_mode(one: Item, two: Item) -> bool:
    return (
        one.node.target is two.node.target
        and mode_arguments(one.node)[0] == mode_arguments(two.node)[0]
    )


def _regions(items: Sequence[Item]) -> Iterator[tuple[int, int]]:
    """Yield the positions of both borders of each region, inner ones first."""
    opened: list[int] = []
    for position, item in enumerate(items):
        if item.role is Role.ENTER:
            opened.append(position)
        elif item.role is Role.EXIT:
            yield opened.pop(), position


def _runs(
    tree: CallTree, items: Sequence[Item], enter: int, leave: int, spans: _Spans
) -> list[_Run]:
    """Return the parts of a region such that no call goes on from one to outside of the region.

    Other than the calls that make the whole part, that is.
    """
    inside = [tree.frame_of[item] for item in items[enter:leave] if item.role is Role.COMPUTE]
    if not inside:
        return []
    around = reduce(common_ancestor, inside)

    def leaver(frame: Frame) -> Frame | None:
        """Return the innermost call around ``frame`` that goes on outside of the region."""
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
        frame = leaver(tree.frame_of[item])
        if not starts:
            starts.append(enter + 1)
        elif frame is not current:
            if depth:
                # A region inside of this one cannot be divided with it.
                return [_Run(enter + 1, leave)]
            starts.append(position)
        current = frame
    return [_Run(*pair) for pair in zip(starts, [*starts[1:], leave], strict=True)]


def _owner(tree: CallTree, items: Sequence[Item], opener: Item, run: _Run, spans: _Spans) -> Frame:
    """Return the call that switches the mode for a part of a region."""
    inside = [
        tree.frame_of[item] for item in items[run.start : run.stop] if item.role is Role.COMPUTE
    ]
    innermost = reduce(common_ancestor, inside)
    owner = common_ancestor(tree.frame_of[opener], innermost)
    for frame in reversed(frames_around(innermost)):
        first, last = spans[frame]
        if frame.depth > owner.depth and (first < run.start or last >= run.stop):
            owner = frame
    return owner


def _spans(tree: CallTree, items: Sequence[Item]) -> dict[Frame, tuple[int, int]]:
    """Return the first and the last position at which each call computes something."""
    spans: dict[Frame, tuple[int, int]] = {}
    for position, item in enumerate(items):
        if item.role is Role.COMPUTE:
            for frame in frames_around(tree.frame_of[item]):
                spans[frame] = (spans.get(frame, (position,))[0], position)
    return spans
