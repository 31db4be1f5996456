"""Every module of real models is replaced by eager's, one at a time, and called alone.

Models of transformers from config; run with ``-s`` for the table: replaced rightly, refused with
a reason, wrong.
"""

from __future__ import annotations

import pytest
import torch

from lowerdeck.unflatten import UnflattenError, unflatten
from lowerdeck_zoo.models.transformers_small import CONFIGURED, Configured
from tests.peers.unflatten_swaps import all_calls, is_same, sweep

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.filterwarnings("ignore")]

CHOSEN = [
    pytest.param(item, id=item.model, marks=pytest.mark.heavy if item.heavy else ())
    for item in CONFIGURED
]
# So many modules may be refused, with a reason: one that is called with text, in Gemma 3.
REFUSED = 1


@pytest.mark.parametrize("item", CHOSEN)
def test_every_module_can_be_replaced_by_eagers(item: Configured) -> None:
    torch.manual_seed(0)
    eager, args = item.build(transformers), item.calls()[0]
    with torch.no_grad():
        found, reasons = sweep(eager, args)
    print(f"\n{item.model}: {dict(found)}", *reasons, sep="\n    ")
    assert not found["wrong"]
    assert not found["alone, wrong"]
    assert not found["changed, wrong"]
    # A change is seen but where the model hardly uses what the module returns.
    assert found["without effect"] < found["changed"] / 3
    assert found["refused"] <= REFUSED
    assert len(reasons) == found["refused"]


@pytest.mark.parametrize("item", CHOSEN)
def test_every_module_of_a_plain_export_can_be_called_alone(item: Configured) -> None:
    torch.manual_seed(0)
    eager, args = item.build(transformers), item.calls()[0]
    with torch.no_grad():
        made = unflatten(torch.export.export(eager, args), preserve="all")
        assert is_same(made(*args), eager(*args))
        calls = all_calls(made, args)
        for row in made.swappable():
            own = made.get_submodule(row.path)
            for given, named, result in calls.get(row.path, ()):
                try:
                    found = own(*given, **named)
                except UnflattenError as error:
                    assert not row.callable_alone, f"{row.path}: {error}"  # noqa: PT017
                else:
                    assert row.callable_alone, row
                    assert is_same(found, result), row.path
