"""Nothing on the way from an exported program to a file traces a program as a whole.

Whatever torch traces (``make_fx``, ``torch.export``, ``run_decompositions``, AOT autograd's
export, ``symbolic_trace``) ends in ``torch.fx.Tracer.trace``, whose calls are counted here.
``lowerdeck.decompose`` records single calls without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.export import ExportedProgram
from torch.fx import Tracer
from torch.fx.experimental.proxy_tensor import make_fx

from lowerdeck.decompose import decompose
from lowerdeck.demo_backends import DelegateMappingDemoPartitioner
from lowerdeck.emitter import UnsupportedError, emit
from lowerdeck.exir_compat import to_edge_transform_and_lower
from lowerdeck.lowered_module import (
    MethodProgramsPartitionerSpec,
    Partitioner,
    find_quantization,
    lower,
    to_backend,
)
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Program, program, programs
from lowerdeck_zoo.executor_backend import ExecutorPartitioner

# Lazily conjugated tensors go torch's own way (``decompose.explain`` says so).
CHOSEN = programs(without="large memory layers names complex")
# The demos take the same way, and a few models show it. The executor cannot take a size as the
# input of a partition.
SHOWN = [
    one
    for one in programs(without="large memory layers names complex dynamic")[::12]
    if one.name != "filled_piece_by_piece"
]
PARTITIONERS: tuple[type[Partitioner], ...] = (
    XnnpackPartitioner,
    ExecutorPartitioner,
    DelegateMappingDemoPartitioner,
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


def test_what_torch_traces_is_counted() -> None:
    with counted() as traced:
        torch.export.export(torch.nn.ReLU(), (torch.ones(2),)).run_decompositions()
        make_fx(torch.nn.ReLU())(torch.ones(2))
    assert len(traced) >= 3


@pytest.mark.parametrize("program", CHOSEN, ids=str)
def test_emission_and_lowering_trace_no_program(program: Program) -> None:
    exported = program.exports()
    with counted() as traced:
        emit(exported).to_bytes()
        emit({name: decompose(one) for name, one in exported.items()}).to_bytes()
    assert traced == []
    chosen = PARTITIONERS if program in SHOWN else PARTITIONERS[:1]
    for partitioner in chosen:
        with counted() as traced:
            spec = MethodProgramsPartitionerSpec(
                exported, {name: partitioner() for name in exported}
            )
            emit(to_backend(spec)).to_bytes()
        assert traced == [], partitioner


def _with_an_executor(program: ExportedProgram) -> bytes:
    with ThreadPoolExecutor(1) as pool:
        return lower(program, "XnnpackBackend", executor=pool).to_bytes()


WAYS: dict[str, Callable[[ExportedProgram], Any]] = {
    "lower, no backend": lambda program: lower(program).to_bytes(),
    "lower, XNNPACK": lambda program: lower(program, "XnnpackBackend").to_bytes(),
    "lower, two methods": lambda program: lower(
        {"one": program, "other": program}, [XnnpackPartitioner(), ExecutorPartitioner()]
    ).to_bytes(),
    "an executor": _with_an_executor,
    "exir's names": lambda program: (
        to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        .to_executorch()
        .buffer
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_from_a_program_to_bytes_traces_it(way: str) -> None:
    exported = program("diffusion_loop").export()
    with counted() as traced:
        assert len(WAYS[way](exported)) > 1000
    assert traced == []


@pytest.mark.parametrize("mode", ["int8", "int8-dynamic", "8da4w"])
def test_quantised_programs_are_not_traced_either(mode: str) -> None:
    pytest.importorskip("torchao")
    offer = find_quantization("XnnpackBackend")
    inputs = (torch.randn(3, 32),)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
    program, partitioner = offer.quantize(mode, model.eval(), inputs, {}, [])
    with counted() as traced:
        lower(program, partitioner).to_bytes()
        emit(to_backend(program, partitioner)).to_bytes()
    assert traced == []


def test_what_torch_fails_on_while_it_traces_such_a_program_is_named() -> None:
    pytest.importorskip("torchao")
    torchao = importlib.import_module("torchao.quantization")
    model = torch.nn.Sequential(torch.nn.Linear(64, 8))
    torchao.quantize_(model, torchao.Int8DynamicActivationIntxWeightConfig())
    program = torch.export.export(model, (torch.randn(2, 64),))
    (node,) = (one for one in program.graph.nodes if "choose_qparams" in str(one.target))
    node.args = (*node.args[:2], [1, 7], *node.args[3:])
    with pytest.raises(UnsupportedError, match=f"node '{node.name}'"):
        emit(program)
