"""The report's picture of memory and the runner's poison agree on what is needed when.

They are two analyses on purpose. The picture has one run of instructions for each tensor, needs no
torch, and must stay linear on a hostile file; poison asks after each instruction which bytes are
needed, and knows from operators' schemas which arguments are written. So what poison holds to be
needed must lie in the picture, and nothing that the picture shows as alive to its end is poisoned
before.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from lowerdeck.emitter import emit
from lowerdeck.runner import load
from lowerdeck.serializer import (
    ExecutionPlan,
    JumpFalseCall,
    KernelCall,
    MoveCall,
    deserialize_pte,
)
from lowerdeck.serializer.report.lifetimes import Block, planned_blocks
from lowerdeck_zoo import Program, programs
from tests.interop.test_corpus import NAMES, PATHS, data_of, record_of

pytestmark = pytest.mark.filterwarnings("ignore")


def _compared(content: bytes, data: Path | None = None) -> int:
    """Compare every method of a file; return how many states of groups of values were."""
    program = load(content, data=data, memory="poison")
    plans = deserialize_pte(content).execution_plan
    return sum(_compare(plan, program.method(plan.name)._poison) for plan in plans)


def _compare(plan: ExecutionPlan, poison: object) -> int:
    groups, live = poison._groups, poison._liveness
    steps = [step.instr_args for chain in plan.chains for step in chain.instructions]
    # Of a moved handle poison holds all that it may stand for to be needed: more than is.
    moved = {
        groups.of(value)
        for step in steps
        if isinstance(step, MoveCall)
        for value in (step.move_from, step.move_to)
    }
    # What is filled row by row poison holds to be needed always: no row alone writes all of it.
    moved |= {
        groups.of(step.args[0])
        for step in steps
        if isinstance(step, KernelCall)
        and plan.operators[step.op_index].name == "executorch_prim::et_copy_index"
    }
    blocks: dict[int, list[Block]] = defaultdict(list)
    for block in planned_blocks(plan):
        blocks[groups.of(block.value)].append(block)
    after = [needed for chain in live.after for needed in chain]
    assert len(after) == len(steps)
    for time, needed in enumerate(after[:-1]):
        match steps[time]:
            # What is needed after a jump back is needed where the loop begins.
            case JumpFalseCall(_, destination) if destination <= time:
                until = time
            case _:
                until = time + 1
        for group, members in blocks.items():
            # In a branch that is not taken nothing is written: poison goes by all ways at once.
            begun = time >= min(block.born for block in members)
            if begun and needed >> group & 1 and group not in moved:
                told = [(block.value, block.born, block.dies) for block in members]
                assert any(born <= time and until <= dies for _, born, dies in told), (time, told)
    return len(blocks) * len(after)


@pytest.mark.parametrize("name", NAMES)
def test_on_files_of_executorch(name: str) -> None:
    assert _compared(PATHS[name].read_bytes(), data_of(name, record_of(name)))


@pytest.mark.parametrize("program", programs(without="large"), ids=str)
def test_on_models(program: Program) -> None:
    _compared(emit(program.exports()).to_bytes())
