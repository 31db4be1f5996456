"""A part of what ``nox -s retraced`` takes apart by the thousand, beside torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lowerdeck.decompose import Explanation
from lowerdeck_zoo import Program, programs
from tests.retraced import judge
from tests.retraced.groups import findings
from tests.retraced.judge import LEFT_OUT, WELL, Finding
from tests.retraced.run import run_group, summary, warm_up

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]

SEEDS, BLOCK = 400, 20
"""Raw programs of the soak's generator."""
MOST_LEFT_OUT = {"raw": 0.25, "writes": 0.5}
"""Of a block of raw programs, the share that torch may fail to export or to take apart: it refuses
many dynamic sizes that eager takes, and most writes to windows."""


OUTCOMES = {
    "constants_of_all_forms": "differs",  # torch makes a parameter of a buffer of that class
    "kernel_limits_of_floats": "wrong in torch",  # an assertion of the exported program fails
    "shifted_names": "wrong in torch",  # program.module() gives both placeholders one name
}
"""What comes of programs of the zoo in which torch itself differs from eager."""
# Its idle dropout returns its input, which is then written: torch's traces take the result for a
# copy, as ours do, and torch cannot decompose the rest of the program.
RAW_OUTCOMES = {("writes/326", "second"): "wrong"}


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm_up()


@pytest.mark.parametrize("program", programs(without="several-methods large"), ids=str)
def test_models_of_the_zoo_come_out_as_torch_gives_them(program: Program) -> None:
    (found,) = run_group(f"zoo/{program.name}")
    assert found.outcome == OUTCOMES.get(program.name, "same"), found
    # Conjugated tensors go torch's way.
    assert not found.whole or program.has("complex"), found


@pytest.mark.parametrize("kind", MOST_LEFT_OUT)
@pytest.mark.parametrize("start", range(0, SEEDS, BLOCK))
def test_raw_programs_come_out_as_torch_gives_them(start: int, kind: str) -> None:
    found: list[Finding] = []
    for seed in range(start, start + BLOCK):
        found += run_group(f"{kind}/{seed}")
    for one in found:
        expected = RAW_OUTCOMES.get((one.group, one.program))
        assert one.outcome == expected if expected else one.outcome in WELL, summary(found)
    left_out = [one for one in found if one.outcome in LEFT_OUT]
    assert len(left_out) <= MOST_LEFT_OUT[kind] * len(found), summary(found)


def test_a_difference_is_found() -> None:
    # A buffer that a scalar is written to becomes a scalar in torch's result.
    (found,) = findings("raw/202")
    assert found.outcome == "lost by torch", found


def test_a_call_that_cannot_be_traced_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch's own way, which the program goes then, gives what torch gives.
    def failed(_: object) -> Explanation:
        return Explanation("'add' cannot be traced", 0, 0, failed=True)

    monkeypatch.setattr(judge, "decompose", lambda program: program.run_decompositions())
    monkeypatch.setattr(judge, "explain", failed)
    found = {one.outcome for one in findings("raw/1")}
    assert "failed" in found
    assert not found - {"failed", "no export"}
