"""Offset assignment for storages: those live at the same time must not overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowerdeck.emitter.memory.lifetimes import Lifetime, most_live_bytes

# Skip repairs for more storages: they cost too much time for the bytes saved.
_REPAIRED_UP_TO = 1500
_REPAIRS = 12
_BUCKET = 32


def best_fit(lives: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Return an offset for each storage and the size of the memory.

    Best fit: each storage is placed in the smallest gap that fits, in several orders. The smallest
    memory is kept; the search ends early if it equals the lower bound.
    """
    bound = most_live_bytes(list(lives))
    best: tuple[list[int], int] | None = None
    for order in _orders(lives):
        placed = _place(lives, order)
        if best is None or placed[1] < best[1]:
            best = placed
        if best[1] <= bound:
            return best
        if len(lives) <= _REPAIRED_UP_TO:
            best = _repair(lives, order, placed, best, bound)
            if best[1] <= bound:
                return best
    return best if best is not None else ([], 0)


def _orders(lives: Sequence[Lifetime]) -> Iterator[list[int]]:
    indices = range(len(lives))
    yield sorted(indices, key=lambda i: (-lives[i].nbytes, lives[i].first))
    yield sorted(indices, key=lambda i: (lives[i].first, -lives[i].nbytes))
    yield sorted(indices, key=lambda i: (lives[i].first - lives[i].last, -lives[i].nbytes))
    yield sorted(indices, key=lambda i: -lives[i].nbytes * (lives[i].last - lives[i].first + 1))
    yield sorted(indices, key=lambda i: (-lives[i].nbytes, -lives[i].last))
    yield sorted(indices, key=lambda i: (-lives[i].last, -lives[i].nbytes))


def _repair(
    lives: Sequence[Lifetime],
    order: list[int],
    placed: tuple[list[int], int],
    best: tuple[list[int], int],
    bound: int,
) -> tuple[list[int], int]:
    """Retry with the storages placed first that ended above the lower bound."""
    current = list(order)
    for _ in range(_REPAIRS):
        offsets = placed[0]
        high = [i for i in current if offsets[i] + lives[i].nbytes > bound]
        chosen = set(high)
        current = high + [i for i in current if i not in chosen]
        placed = _place(lives, current)
        if placed[1] < best[1]:
            best = placed
        if best[1] <= bound:
            break
    return best


def _place(lives: Sequence[Lifetime], order: Sequence[int]) -> tuple[list[int], int]:
    offsets = [0] * len(lives)
    total = 0
    placed = _Calendar()
    for index in order:
        life = lives[index]
        size = life.nbytes
        first, last = life.first, life.last
        busy: list[tuple[int, int]] = []
        for index_there in placed.during(first, last):
            there = lives[index_there]
            # Storages in the same bucket may have disjoint lifetimes.
            if there.first <= last and first <= there.last:
                start = offsets[index_there]
                busy.append((start, start + there.nbytes))
        busy.sort()
        best, best_gap, cursor = -1, -1, 0
        for start, stop in busy:
            gap = start - cursor
            if gap >= size and (best < 0 or gap < best_gap):
                best, best_gap = cursor, gap
            cursor = max(cursor, stop)
        offsets[index] = cursor if best < 0 else best
        total = max(total, offsets[index] + size)
        placed.add(index, life.first, life.last)
    return offsets, total


class _Calendar:
    """Interval index of storages: finds those live in a range of steps without a full scan."""

    def __init__(self) -> None:
        self._by_bucket: dict[int, list[int]] = {}
        self._long: list[int] = []

    def add(self, index: int, first: int, last: int) -> None:
        buckets = range(first // _BUCKET, last // _BUCKET + 1)
        if len(buckets) > _BUCKET:
            self._long.append(index)
            return
        for bucket in buckets:
            self._by_bucket.setdefault(bucket, []).append(index)

    def during(self, first: int, last: int) -> list[int]:
        indices: set[int] = set(self._long)
        buckets = range(first // _BUCKET, last // _BUCKET + 1)
        by_bucket = self._by_bucket
        chosen = (
            buckets if len(buckets) <= len(by_bucket) else [b for b in by_bucket if b in buckets]
        )
        for bucket in chosen:
            indices.update(by_bucket.get(bucket, ()))
        return list(indices)
