"""Offsets never let live storages overlap, and stay near the bound of live bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowerdeck.emitter import Lifetime, MemoryPlanError, Place, PlanRequest, check_plan, one_memory
from lowerdeck.emitter.ir.values import Role, Storage
from lowerdeck.emitter.memory.lifetimes import most_live_bytes
from lowerdeck.emitter.memory.placement import best_fit


def life(name: str, nbytes: int, first: int, last: int) -> Lifetime:
    return Lifetime(Storage(nbytes, Role.ACTIVATION, name), nbytes, first, last)


@st.composite
def lifetimes(draw: st.DrawFn) -> tuple[Lifetime, ...]:
    found = []
    for index in range(draw(st.integers(0, 40))):
        first = draw(st.integers(-1, 60))
        last = draw(st.integers(first, 61))
        found.append(life(f"v{index}", 16 * draw(st.integers(0, 64)), first, last))
    return tuple(found)


@given(lifetimes())
@settings(max_examples=50, deadline=None)
def test_every_plan_is_right_and_neither_below_the_bound_nor_above_the_sum(
    lives: tuple[Lifetime, ...],
) -> None:
    request = PlanRequest("forward", lives)
    check_plan(request, one_memory(request))
    _, size = best_fit(lives)
    assert most_live_bytes(list(lives)) <= size <= sum(one.nbytes for one in lives)


def test_a_chain_needs_two_storages() -> None:
    lives = [life(f"v{i}", 64, i, i + 1) for i in range(500)]
    assert best_fit(lives)[1] == 128


def test_long_lives_among_many_short_ones_are_respected() -> None:
    lives = [life("kept", 32, -1, 3000), *(life(f"v{i}", 64, i, i + 1) for i in range(3000))]
    request = PlanRequest("forward", tuple(lives))
    places = one_memory(request)
    check_plan(request, places)
    assert max(p.offset + one.nbytes for p, one in zip(places, lives, strict=True)) == 160


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([Place(1, 0)], "1 places, expected 3"),
        ([Place(1, 0), Place(1, 32), Place(2, 0)], "overlap"),
        ([Place(0, 0), Place(1, 64), Place(2, 0)], "memory_id from 1"),
        ([Place(1, 8), Place(1, 80), Place(2, 0)], "multiple of 16"),
        # What is between two neighbours is compared with both.
        ([Place(1, 0), Place(1, 64), Place(1, 48)], "'between'.*overlap|overlap.*'between'"),
    ],
)
def test_the_checker_refuses_bad_plans(places: list[Place], message: str) -> None:
    lives = (life("one", 64, 0, 2), life("two", 64, 2, 3), life("between", 32, 1, 2))
    with pytest.raises(MemoryPlanError, match=message):
        check_plan(PlanRequest("forward", lives), places)
