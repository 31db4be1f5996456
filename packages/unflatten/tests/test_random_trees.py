"""Random models give eager's values, mutations, state and names in every form of export."""

from __future__ import annotations

import pytest
from random_models import random_model  # type: ignore[import-not-found]
from unflatten_comparison import FORMS, check  # type: ignore[import-not-found]


def _check(seed: int) -> None:
    model, args = random_model(seed)
    names = [name for name, _ in model.named_modules() if "@" not in name]
    preserved = tuple(name for name in names if name and hash((seed, name)) % 4 == 0)
    form = FORMS[seed % len(FORMS)]
    options = {}
    if seed % 3 == 0 and preserved:
        options["preserve_module_call_signature"] = preserved
    check(model, args, calls=2, forms=(form,), **options)


@pytest.mark.parametrize("seed", range(100))
def test_random_model(seed: int) -> None:
    _check(seed)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(100, 1100))
def test_many_random_models(seed: int) -> None:
    _check(seed)
