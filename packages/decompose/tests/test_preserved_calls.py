"""Programs that record how modules are called."""

from __future__ import annotations

import torch
from torch import nn

from lowerdeck.decompose import decompose


def test_signatures_of_modules_are_dropped() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(2, 4)
    program = torch.export.export(model, (x,), preserve_module_call_signature=("0", "1"))
    made = decompose(program)
    assert [entry.fqn for entry in made.module_call_graph if entry.signature] == [""]
    torch.testing.assert_close(made.module()(x), model(x))
    torch.testing.assert_close(torch.export.unflatten(made)(x), model(x))
