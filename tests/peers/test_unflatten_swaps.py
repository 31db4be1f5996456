"""Every module of real models is replaced by eager's, one at a time, and called alone.

Models of transformers from config; run with ``-s`` for the table: replaced rightly, refused with
a reason, wrong.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from lowerdeck.unflatten import export_preserving, unflatten
from tests.peers.transformer_models import CONFIGURED, Configured

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.filterwarnings("ignore")]

CHOSEN = [
    pytest.param(item, id=item.model, marks=pytest.mark.heavy if item.heavy else ())
    for item in CONFIGURED
]
# So many modules may be refused, with a reason: one that is called with text, in Gemma 3.
REFUSED = 1


def leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_same(found: Any, wanted: Any) -> bool:
    pairs = list(zip(leaves(found), leaves(wanted), strict=True))
    return all(torch.allclose(one, other, atol=1e-4, rtol=1e-3) for one, other in pairs)


def recorded(made: nn.Module, args: tuple[Any, ...]) -> dict[str, tuple[Any, Any, Any]]:
    """Return what each module takes and returns, the first time that it is called."""
    found: dict[str, tuple[Any, Any, Any]] = {}
    handles = []
    for path, module in made.named_modules():

        def note(_: Any, args: Any, kwargs: Any, result: Any, path: str = path) -> None:
            # Copies: callers change what they were given in place.
            found.setdefault(path, copy.deepcopy((args, dict(kwargs), result)))

        handles.append(module.register_forward_hook(note, with_kwargs=True))
    made(*args)
    for handle in handles:
        handle.remove()
    return found


def sweep(eager: nn.Module, args: tuple[Any, ...]) -> tuple[Counter[str], list[str]]:
    """Replace each module by eager's, and call each alone; return how often what came out."""
    made = unflatten(export_preserving(eager, args))
    wanted, calls = eager(*args), recorded(made, args)
    assert is_same(made(*args), wanted)
    found: Counter[str] = Counter()
    reasons = []
    for row in made.swappable():
        outer, _, last = row.path.rpartition(".")
        parent = made.get_submodule(outer)
        own = getattr(parent, last)
        if row.reason:
            reasons.append(f"{row.path}: {row.reason}")
        if row.callable_alone and row.path in calls:
            given, named, result = calls[row.path]
            found["alone" if is_same(own(*given, **named), result) else "alone, wrong"] += 1
        if not row.replaceable:
            found["refused"] += 1
            continue
        setattr(parent, last, eager.get_submodule(row.path))
        found["right" if is_same(made(*args), wanted) else "wrong"] += 1
        setattr(parent, last, own)
    return found, reasons


@pytest.mark.parametrize("item", CHOSEN)
def test_every_module_can_be_replaced_by_eagers(item: Configured) -> None:
    torch.manual_seed(0)
    eager, args = item.build(transformers), item.calls()[0]
    with torch.no_grad():
        found, reasons = sweep(eager, args)
    print(f"\n{item.model}: {dict(found)}", *reasons, sep="\n    ")
    assert not found["wrong"]
    assert not found["alone, wrong"]
    assert found["refused"] <= REFUSED
    assert len(reasons) == found["refused"]


@pytest.mark.parametrize("item", CHOSEN)
def test_every_module_of_a_plain_export_can_be_called_alone(item: Configured) -> None:
    torch.manual_seed(0)
    eager, args = item.build(transformers), item.calls()[0]
    with torch.no_grad():
        made = unflatten(torch.export.export(eager, args), preserve="all")
        assert is_same(made(*args), eager(*args))
        for path, (given, named, result) in recorded(made, args).items():
            assert all(isinstance(leaf, torch.Tensor) for leaf in given) or not path, path
            assert is_same(made.get_submodule(path)(*given, **named), result), path
