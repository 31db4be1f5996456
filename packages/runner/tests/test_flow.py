"""The order of instructions, and what is needed after each."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lowerdeck.runner.instructions import BoundChain, Instruction
from lowerdeck.runner.memory.liveness import Groups, analyse, members


def chain(*steps: Instruction, follow: list[tuple[int, ...]] | None = None) -> BoundChain:
    after = follow or [(index + 1,) for index in range(len(steps))]
    return BoundChain((), steps, tuple(after), jumps=follow is not None)


def step(reads: list[int], writes: list[int]) -> Instruction:
    return Instruction("step", tuple(reads), tuple(writes), tuple(writes))


def test_what_a_loop_reads_is_needed_to_its_end() -> None:
    code = chain(
        step([0], [1]),
        step([1], [2]),
        step([2], [3]),
        step([4], []),
        follow=[(1,), (2,), (3,), (1, 4)],
    )
    live = analyse([code], Groups(5, [], [], {}), inputs=[0, 4], outputs=[3], state=[])
    assert all(1 in members(bits) for bits in live.after[0])


def test_a_moved_value_keeps_the_memory_that_it_came_from() -> None:
    code = chain(step([0], [1]), step([1], [2]), step([2], [3]))
    live = analyse([code], Groups(4, [], [(1, 2)], {}), inputs=[0], outputs=[3], state=[])
    assert members(live.after[0][1]) == [1, 2]
    assert members(live.after[0][2]) == [3]
    assert live.kept == 0


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_liveness_of_straight_code_agrees_with_a_search_forward(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(2, 12)
    code = [
        step([rng.randrange(n + 1) for _ in range(rng.randrange(3))], [n + 1])
        for n in range(count)
    ]
    live = analyse(
        [chain(*code)], Groups(count + 1, [], [], {}), inputs=[0], outputs=[count], state=[]
    )
    for index in range(count):
        later = {value for item in code[index + 1 :] for value in item.reads} | {count}
        written = {value for item in code[: index + 1] for value in item.writes} | {0}
        expected = {value for value in later if value in written}
        assert set(members(live.after[0][index])) == expected
