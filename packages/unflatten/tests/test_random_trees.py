"""Random models give eager's values, mutations, state and names in every form of export."""

from __future__ import annotations

import copy
import zlib

import pytest
from random_models import random_model  # type: ignore[import-not-found]
from unflatten_comparison import FORMS, compare, programs  # type: ignore[import-not-found]

from lowerdeck.unflatten import unflatten

# torch.cond compiles itself when eager runs it, and looks at gradients of what is no leaf.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Decomposing this program lost:UserWarning"),
]


def _check(seed: int) -> None:
    model, args = random_model(seed)
    names = [name for name, _ in model.named_modules() if name]
    preserved = tuple(name for name in names if zlib.crc32(f"{seed} {name}".encode()) % 4 == 0)
    options = {}
    if seed % 3 == 0 and preserved:
        options["preserve_module_call_signature"] = preserved
    # The costly forms of export less often than the cheap one.
    form = FORMS[seed // 3 % 8] if seed // 3 % 8 < len(FORMS) else FORMS[0]
    try:
        found = programs(model, args, forms=(form,), **options)
    except Exception as error:
        # torch's own: a preserved module that is called in two ways, a detached result.
        pytest.skip(
            f"torch.export cannot export this model: {type(error).__name__}: {error}"[:200]
        )
    module = unflatten(found[form])
    compare(copy.deepcopy(model), module, args, calls=2, names="non-strict" not in form)


# 195 hands a value to a second form of a preserved call.
@pytest.mark.parametrize("seed", [*range(100), 195])
def test_random_model(seed: int) -> None:
    _check(seed)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(100, 1100))
def test_many_random_models(seed: int) -> None:
    _check(seed)
