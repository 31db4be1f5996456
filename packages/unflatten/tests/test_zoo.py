"""Every case of the zoo in every use: what an unflattened module does is what eager does."""

from __future__ import annotations

from typing import Any

import pytest
from unflatten_zoo import Case, cases, judges, ways  # type: ignore[import-not-found]

# Torch's own, of its recurrent layers, of what it compiles and of what it exports.
pytestmark = pytest.mark.filterwarnings("ignore")


def _named(*names: str) -> list[Any]:
    return [pytest.param(case, way, id=f"{case}-{way}") for case, way in ways(*names)]


@pytest.mark.parametrize(("case", "way"), _named())
def test_calls(case: Case, way: str) -> None:
    judges.judge_calls(case, way)


@pytest.mark.parametrize(("case", "way"), _named("plain", "preserving", "decomposed"))
def test_state(case: Case, way: str) -> None:
    judges.judge_state(case, way)


@pytest.mark.parametrize("case", cases("gradients"), ids=str)
def test_gradients(case: Case) -> None:
    judges.judge_gradients(case)


@pytest.mark.parametrize("case", cases("table"), ids=str)
def test_table(case: Case) -> None:
    judges.judge_table(case)


@pytest.mark.parametrize("case", cases("swaps"), ids=str)
def test_swaps(case: Case) -> None:
    judges.judge_swaps(case)


@pytest.mark.parametrize("case", cases("wrapping"), ids=str)
def test_wrapping(case: Case) -> None:
    judges.judge_wrapping(case)


@pytest.mark.parametrize("case", cases("hooks"), ids=str)
def test_hooks(case: Case) -> None:
    judges.judge_hooks(case)


@pytest.mark.parametrize("case", cases("copies"), ids=str)
def test_copies(case: Case) -> None:
    judges.judge_copies(case)


@pytest.mark.parametrize("case", cases("compiled"), ids=str)
def test_compiled(case: Case) -> None:
    judges.judge_compiled(case)


@pytest.mark.parametrize("case", cases("exported again"), ids=str)
def test_exported_again(case: Case) -> None:
    judges.judge_exported_again(case)


@pytest.mark.parametrize("case", cases("alone"), ids=str)
def test_alone(case: Case) -> None:
    judges.judge_alone(case)


@pytest.mark.parametrize("case", cases("threads"), ids=str)
def test_threads(case: Case) -> None:
    judges.judge_threads(case)
