"""A program that was exported on a GPU becomes the file that it is from the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_another_device import on_cuda
from torch.export import ExportedProgram

from lowerdeck.decompose import DecomposeError
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import lower
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Program, programs

KINDS = ("stateful", "language-model", "control-flow", "dtypes", "recurrent", "dynamic", "layouts")
# torch turns autocast off without a GPU: the last test.
CHOSEN = programs(*KINDS, without="large several-methods modes")


def _file(program: ExportedProgram) -> bytes:
    return emit(program).to_bytes()


def _lowered(program: ExportedProgram) -> bytes:
    return lower(program, XnnpackPartitioner()).buffer


@pytest.mark.parametrize("written", [_file, _lowered])
@pytest.mark.parametrize("program", CHOSEN, ids=str)
def test_the_file_is_that_of_the_cpu(program: Program, written: Callable[[Any], bytes]) -> None:
    exported = program.export()
    assert written(on_cuda(exported)) == written(exported)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch turns autocast off without a GPU")
def test_autocast_of_a_device_that_is_not_here_is_refused() -> None:
    class Cast(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ x

    program = torch.export.export(Cast(), (torch.ones(2, 2),))
    with pytest.raises(DecomposeError, match="decompose the program where it was exported"):
        emit(on_cuda(program))
