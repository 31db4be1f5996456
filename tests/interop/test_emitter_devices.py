"""A program that was exported on a GPU becomes the file that it is from the CPU."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from lowerdeck.decompose import DecomposeError
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import lower, to_backend
from lowerdeck.runner import load
from lowerdeck.torch_base import pytree
from lowerdeck.xnnpack import XnnpackPartitioner, XnnpackRuntime
from tests.interop.zoo import MODELS, Model

sys.path.insert(0, str(Path(__file__).parents[2] / "packages/decompose/tests"))
from on_another_device import on_cuda

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = ("state", "decoders", "control_flow", "dtypes", "recurrent", "dynamic", "layouts")
CHOSEN = [
    model
    for model in MODELS
    if not model.heavy and model.build.__module__.rpartition(".")[2] in KINDS
]


def _file(program: ExportedProgram) -> bytes:
    return emit(program).to_bytes()


def _lowered(program: ExportedProgram) -> bytes:
    return lower(program, XnnpackPartitioner()).buffer


@pytest.mark.parametrize("written", [_file, _lowered])
@pytest.mark.parametrize("model", CHOSEN, ids=lambda model: model.name)
def test_the_file_is_that_of_the_cpu(model: Model, written: Callable[[Any], bytes]) -> None:
    program = model.export()[1]
    assert written(on_cuda(program)) == written(program)


@pytest.mark.parametrize("model", CHOSEN, ids=lambda model: model.name)
def test_partitions_are_those_of_the_cpu(model: Model) -> None:
    _, program, calls = model.export()
    inputs = [each for each in pytree.tree_leaves(calls[0]) if each is not None]
    found = []
    for given in (program, on_cuda(program)):
        data = _file(to_backend(given, XnnpackPartitioner()))
        method = load(data, backends={"XnnpackBackend": XnnpackRuntime()}).method("forward")
        found.append([each.clone() for each in method.run_flat(copy.deepcopy(inputs))])
    torch.testing.assert_close(*found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch turns autocast off without a GPU")
def test_autocast_of_a_device_that_is_not_here_is_refused() -> None:
    class Cast(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ x

    program = torch.export.export(Cast(), (torch.ones(2, 2),))
    with pytest.raises(DecomposeError, match="take the program apart where it was exported"):
        emit(on_cuda(program))
