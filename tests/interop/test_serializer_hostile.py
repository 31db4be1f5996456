"""No file that ``verify_pte`` accepts makes the official runtime crash or hang."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from serializer_hostile import bad_contents, damaged

from lowerdeck.serializer import FormatError, deserialize_pte, serialize_pte, verify_pte
from lowerdeck_zoo import official

CORPUS = Path(__file__).parent / "corpus"
pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)

# Programs of delegates hold bytes that only their backend can check: they are left whole.
NAMES = (
    *("control_cond", "conv_portable", "dynamic_shape", "kv_cache", "lists_strings"),
    *("multi_method_shared", "mutable_init", "no_constants"),
)


def _outcomes(name: str, seed: int, count: int) -> Counter[str]:
    """Return how many damaged files were refused, and what became of the others."""
    original = (CORPUS / f"{name}.pte").read_bytes()
    calls = torch.load(CORPUS / f"{name}.io.pt", weights_only=True)["calls"][:2]
    found: Counter[str] = Counter()
    accepted: list[tuple[str, bytes]] = []
    ours = serialize_pte(deserialize_pte(original))
    for file in (original, ours):
        for what, damage in [*damaged(file, seed, count), *bad_contents(file)]:
            try:
                verify_pte(damage)
            except FormatError as error:
                found[type(error).__name__] += 1
            else:
                accepted.append((what, damage))
    cases = [
        official.Case(damage, [official.Call(call["inputs"], call["method"]) for call in calls])
        for _, damage in accepted
    ]
    for (what, _), outcome in zip(accepted, official.run_many(cases), strict=True):
        assert not isinstance(outcome, official.Crash | official.TimedOut), (name, what, outcome)
        found[type(outcome).__name__] += 1
    return found


SEEDS = [(1, 100), *(pytest.param(seed, 1500, marks=pytest.mark.heavy) for seed in range(10, 14))]


@pytest.mark.parametrize(("seed", "count"), SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_accepted_files_do_not_crash_the_runtime(name: str, seed: int, count: int) -> None:
    found = _outcomes(name, seed, count)
    assert sum(found.values()) > 2 * count
    assert found["Ran"]
