"""Pair the instructions of two methods in nearly linear time."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

_LARGEST_EXACT = 40_000
"""A gap is matched exactly if the product of its lengths is at most this, else by anchors."""

_WORK = 64
"""Limit of compared items per input item. A malicious input, from which one item at a time is
split off, would take quadratic time; the rest of it is left unpaired."""

Row = tuple[int, int]


def pair_rows(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[Row]:
    """Return pairs of items of two sequences, in order.

    Common prefixes and suffixes are paired first, then unique common items in order (as in
    patience diff), then the gaps between them.

    Args:
        old: Keys of the first sequence.
        new: Keys of the second.

    Returns:
        Pairs of indices, -1 for none: ``(3, 4)`` for equal items, ``(3, -1)`` for a removed item,
        ``(-1, 4)`` for an added one.

    Example:
        >>> pair_rows("abc", "abxc")
        [(0, 0), (1, 1), (-1, 2), (2, 3)]
    """
    rows: list[Row] = []
    # A stack in place of recursion: anchors split a gap into smaller ones.
    waiting = [(0, len(old), 0, len(new))]
    work = _WORK * (len(old) + len(new)) + _LARGEST_EXACT
    while waiting:
        start, end, begin, stop = waiting.pop()
        while start < end and begin < stop and old[start] == new[begin]:
            rows.append((start, begin))
            start, begin = start + 1, begin + 1
        tail = 0
        shorter = min(end - start, stop - begin)
        while tail < shorter and old[end - 1 - tail] == new[stop - 1 - tail]:
            tail += 1
        if tail:
            waiting.append((end - tail, end, stop - tail, stop))
            waiting.append((start, end - tail, begin, stop - tail))
            continue
        area = (end - start) * (stop - begin)
        work -= area if area <= _LARGEST_EXACT else end - start + stop - begin
        if not area or (area <= _LARGEST_EXACT and work >= 0):
            rows += _exact(old, new, range(start, end), range(begin, stop))
            continue
        anchors = _anchors(old, new, range(start, end), range(begin, stop)) if work >= 0 else []
        if not anchors:
            rows += [(index, -1) for index in range(start, end)]
            rows += [(-1, index) for index in range(begin, stop)]
            continue
        cuts = [*anchors, (end, stop)]
        gaps = [(start, anchors[0][0], begin, anchors[0][1])]
        gaps += [(here[0], there[0], here[1], there[1]) for here, there in pairwise(cuts)]
        waiting += reversed(gaps)
    return rows


def _exact(
    old: Sequence[Hashable], new: Sequence[Hashable], left: range, right: range
) -> list[Row]:
    rows: list[Row] = []
    matcher = SequenceMatcher(
        None, [old[i] for i in left], [new[i] for i in right], autojunk=False
    )
    for tag, start, end, begin, stop in matcher.get_opcodes():
        if tag == "equal":
            rows += zip(left[start:end], right[begin:stop], strict=True)
        else:
            rows += [(index, -1) for index in left[start:end]]
            rows += [(-1, index) for index in right[begin:stop]]
    return rows


def _anchors(
    old: Sequence[Hashable], new: Sequence[Hashable], left: range, right: range
) -> list[Row]:
    """Return the longest increasing subsequence of items that occur once on each side."""
    in_old = Counter(old[i] for i in left)
    in_new = Counter(new[i] for i in right)
    index = {new[i]: i for i in right if in_new[new[i]] == 1}
    candidates = [(i, index[old[i]]) for i in left if in_old[old[i]] == 1 and old[i] in index]
    tops: list[int] = []
    piles: list[int] = []
    before: list[int] = []
    for number, (_, where) in enumerate(candidates):
        pile = bisect_left(tops, where)
        before.append(piles[pile - 1] if pile else -1)
        if pile == len(tops):
            tops.append(where)
            piles.append(number)
        else:
            tops[pile] = where
            piles[pile] = number
    run: list[Row] = []
    number = piles[-1] if piles else -1
    while number >= 0:
        run.append(candidates[number])
        number = before[number]
    return run[::-1]
