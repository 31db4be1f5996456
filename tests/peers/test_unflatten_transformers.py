"""Models of Hugging Face ``transformers``, made from configurations, exported in strict mode."""

from __future__ import annotations

import copy

import pytest
import torch

from lowerdeck.unflatten import unflatten
from lowerdeck_zoo.models.transformers_small import CONFIGURED, Configured

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]
CHOSEN = [item for item in CONFIGURED if not item.heavy]


@pytest.mark.parametrize("item", CHOSEN, ids=lambda item: item.model)
def test_a_strict_export_gets_its_hierarchy_back(item: Configured) -> None:
    torch.manual_seed(0)
    model, args = item.build(transformers), item.calls()[0]
    try:
        program = torch.export.export(copy.deepcopy(model), args, strict=True)
    except Exception as error:
        pytest.skip(f"torch.export cannot export it: {type(error).__name__}: {error}"[:300])
    module = unflatten(program)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(module(*args), model(*args))
    assert list(module.state_dict()) == list(model.state_dict())
    mine = {key for key, _ in module.named_modules(remove_duplicate=False)}
    assert mine == {key for key, _ in model.named_modules(remove_duplicate=False)}
