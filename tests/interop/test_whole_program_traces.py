"""Nothing on the way from an exported program to a file traces a program as a whole.

Whatever torch traces (``make_fx``, ``torch.export``, ``run_decompositions``, AOT autograd's
export, ``symbolic_trace``) ends in ``torch.fx.Tracer.trace``, whose calls are counted here.
``lowerdeck.decompose`` records single calls without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.export import ExportedProgram
from torch.fx import Tracer
from torch.fx.experimental.proxy_tensor import make_fx

from lowerdeck.decompose import decompose
from lowerdeck.demo_backends import (
    CompilerDemoPartitioner,
    DelegateMappingDemoPartitioner,
    ExecutorPartitioner,
    SharedWeightsDemoPartitioner,
)
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import Partitioner, to_backend
from lowerdeck.lowered_module.commands import lower_model
from lowerdeck.xnnpack import XnnpackPartitioner
from tests.interop.zoo import MODELS, Model

pytestmark = pytest.mark.filterwarnings("ignore")

CHOSEN = [pytest.param(m, id=m.name, marks=pytest.mark.heavy if m.heavy else ()) for m in MODELS]
# The inductor demo is not among them: to compile with torch's compiler is to trace with it.
PARTITIONERS: tuple[type[Partitioner], ...] = (
    XnnpackPartitioner,
    ExecutorPartitioner,
    DelegateMappingDemoPartitioner,
    CompilerDemoPartitioner,
    SharedWeightsDemoPartitioner,
)


@contextmanager
def counted() -> Iterator[list[Any]]:
    """Give a list of what was traced as a whole."""
    traced: list[Any] = []
    real = Tracer.trace

    def trace(self: Tracer, root: Any, *args: Any, **kwargs: Any) -> Any:
        traced.append(root)
        return real(self, root, *args, **kwargs)

    with mock.patch.object(Tracer, "trace", trace):
        yield traced


def _exported(model: Model) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.export()[1]


class Small(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x).to(torch.float64) + 1


def test_every_way_of_torch_to_trace_a_program_is_counted() -> None:
    program = torch.export.export(Small(), (torch.ones(2),))
    for way in (
        lambda: torch.export.export(Small(), (torch.ones(2),)),
        program.run_decompositions,
        lambda: make_fx(Small())(torch.ones(2)),
        lambda: torch.fx.symbolic_trace(Small()),
    ):
        with counted() as traced:
            way()
        assert traced


@pytest.mark.parametrize("model", CHOSEN)
def test_emission_traces_no_program(model: Model) -> None:
    program = _exported(model)
    with counted() as traced:
        emit(program).to_bytes()
        emit(decompose(program)).to_bytes()
    assert traced == []


@pytest.mark.parametrize("model", CHOSEN)
def test_lowering_traces_no_program(model: Model) -> None:
    program = _exported(model)
    # The demos take the same way, and a few models show it.
    chosen = PARTITIONERS if MODELS.index(model) % 12 == 0 else PARTITIONERS[:1]
    for partitioner in chosen:
        with counted() as traced:
            emit(to_backend(program, partitioner())).to_bytes()
        assert traced == [], partitioner


def test_the_command_traces_only_to_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "traced_example.py").write_text(
        "import torch\n"
        "def example():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), "
        "torch.nn.SiLU())\n"
        "    return model, (torch.ones(2, 4),)\n"
    )
    monkeypatch.chdir(tmp_path)
    with counted() as traced:
        torch.export.export(torch.nn.Linear(4, 4).eval(), (torch.ones(2, 4),))
    exports = len(traced)
    with counted() as traced:
        for backends in ([], ["XnnpackBackend"]):
            lower_model("traced_example:example", backends, tmp_path / "m.pte", check=False)
    assert len(traced) == 2 * exports
