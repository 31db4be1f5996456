"""Random models with modules replaced, wrapped and hooked give what eager's give."""

from __future__ import annotations

import pytest
from random_changes import check_seed  # type: ignore[import-not-found]

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Eager converts a value here:UserWarning"),
    pytest.mark.filterwarnings("ignore:Decomposing this program lost:UserWarning"),
]

# Those that found something, and some more; nox -s changes runs others each night.
FOUND = (25, 56, 80, 192, 267, 435, 857)


@pytest.mark.parametrize("seed", [*FOUND, *range(1000, 1019)])
def test_changed_modules_do_what_eagers_do(seed: int) -> None:
    assert check_seed(seed, cost=12 if seed not in FOUND else 20).outcome in {"same", "no export"}
