"""Decomposed batch normalisation trains as eager's does."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram, export
from unflatten_comparison import compare  # type: ignore[import-not-found]

from lowerdeck.unflatten import unflatten


def _decomposed(model: nn.Module, x: torch.Tensor) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = export(model, (x,))
        decomposed: ExportedProgram = program.run_decompositions()
        return decomposed


def test_a_decomposed_model_in_training_trains() -> None:
    eager: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    x = torch.randn(4, 3)
    module: Any = unflatten(_decomposed(eager, x))
    for subject in (eager, module):
        optimizer = torch.optim.SGD(subject.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            subject(x).pow(2).sum().backward()
            optimizer.step()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value)


def test_it_is_exported_and_compiled_again() -> None:
    eager, x = nn.Sequential(nn.BatchNorm1d(3)), torch.randn(4, 3)
    program = _decomposed(eager, x)
    again = unflatten(_decomposed(unflatten(program), x))
    compare(copy.deepcopy(eager), again, (x,))
    compiled: Any = torch.compile(unflatten(program), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), copy.deepcopy(eager)(x))
