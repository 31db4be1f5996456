"""Random models with modules replaced, wrapped and hooked give what eager's give."""

from __future__ import annotations

import pytest
from random_changes import FORMS, check_seed  # type: ignore[import-not-found]

from lowerdeck_zoo.seeds import seeds

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Eager converts a value here:UserWarning"),
    pytest.mark.filterwarnings("ignore:Decomposing this program lost:UserWarning"),
]

# Those that found something, and some more; nox -s changes runs others each night.
FOUND = {
    25: "preserving",
    56: "strict preserving",
    80: "strict preserving",
    192: "preserving",
    267: "plain",
    435: "plain",
    857: "copied",
}


@pytest.mark.parametrize(("seed", "form"), FOUND.items())
def test_what_found_something_does_what_eager_does(seed: int, form: str) -> None:
    assert check_seed(seed, form=form).outcome in {"same", "no export"}


@pytest.mark.parametrize("seed", seeds(2 * len(FORMS), first=1000))
def test_changed_modules_do_what_eagers_do(seed: int) -> None:
    outcome = check_seed(seed, cost=12).outcome
    assert outcome in {"same", "no export", "refused", "another program"}
