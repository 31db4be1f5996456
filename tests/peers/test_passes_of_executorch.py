"""Passes written for ExecuTorch change programs that never saw its `to_edge`."""

from __future__ import annotations

import pytest
import torch

exir = pytest.importorskip("executorch.exir", reason="executorch with its dependencies is needed")

from executorch.exir.dialects._ops import ops as exir_ops  # noqa: E402
from executorch.exir.pass_base import ExportPass, PassResult  # noqa: E402
from executorch.exir.pass_manager import PassManager  # noqa: E402
from torch.fx.passes.infra.pass_manager import PassManager as TorchsManager  # noqa: E402

from lowerdeck.exir_compat import (  # noqa: E402
    EdgeCompileConfig,
    ExecutorchBackendConfig,
    to_edge,
    to_edge_transform_and_lower,
)
from lowerdeck.lowered_module.testing import RunPartitioner  # noqa: E402
from lowerdeck.runner import load  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
EDGE = exir_ops.edge.aten
# Else `exported_program()` is in the Edge dialect here, which has been imported.
IN_TORCHS = EdgeCompileConfig(_use_edge_ops=False)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("total", torch.zeros(4))
        self.last = torch.sin

    def forward(self, x):
        y = (self.linear(x) + 2).reshape(4, -1).t() * 0.5
        self.total.add_(y.sum(0))
        return self.last(y) - self.total


class SinToCos(ExportPass):
    """Traces the graph anew."""

    def call_operator(self, op, args, kwargs, meta):
        op = EDGE.cos.default if op == EDGE.sin.default else op
        return super().call_operator(op, args, kwargs, meta)


class InPlace(ExportPass):
    """Changes the nodes that it finds, as passes with a method ``call`` do."""

    def call(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.target == EDGE.sin.default:
                node.target = EDGE.cos.default
        return PassResult(graph_module, True)


class AddToSub(ExportPass):
    """Replaces what reads a number, which is a tensor in that dialect."""

    def call_operator(self, op, args, kwargs, meta):
        op = EDGE.sub.Tensor if op == EDGE.add.Tensor else op
        return super().call_operator(op, args, kwargs, meta)


def torchs():
    manager = TorchsManager()
    manager.add_pass(SinToCos())
    return manager


def made(manager, x, config=None):
    program = load(manager.to_executorch(config).buffer)
    return [program.run("forward", x) for _ in range(2)]


def wanted(x, change=lambda model: None):
    torch.manual_seed(0)
    model = Model()
    change(model)
    return [model(x) for _ in range(2)]


@pytest.fixture
def exported():
    torch.manual_seed(0)
    return torch.export.export(Model(), (torch.ones(4, 4),))


def to_cos(model):
    model.last = torch.cos


@pytest.mark.parametrize("form", [SinToCos(), InPlace(), PassManager([SinToCos()]), torchs()])
@pytest.mark.parametrize("way", ["transform", "passes", "first"])
def test_passes_of_exir_find_its_operators(form, way, exported):
    x = torch.randn(4, 4)
    config = ExecutorchBackendConfig(passes=[form]) if way == "passes" else None
    if way == "first":
        manager = to_edge_transform_and_lower(exported, [form], compile_config=IN_TORCHS)
    else:
        manager = to_edge(exported, compile_config=IN_TORCHS)
    if way == "transform":
        manager = manager.transform([form])
    torch.testing.assert_close(made(manager, x, config), wanted(x, to_cos))
    for node in manager.exported_program().graph.nodes:
        assert node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload)


def test_what_a_pass_leaves_is_as_it_was(exported):
    manager = to_edge(exported, compile_config=IN_TORCHS)
    before = str(manager.exported_program().graph)
    after = manager.transform([InPlace()]).exported_program()
    assert str(after.graph) == before.replace("aten.sin", "aten.cos")
    assert after.dialect == "ATEN"
    assert str(manager.exported_program().graph) == before


def test_what_a_pass_puts_beside_a_number_computes_with_it():
    x, found = torch.randn(4, 4), []
    for way in (to_edge, exir.to_edge):
        torch.manual_seed(0)
        exported = torch.export.export(Model(), (x,))
        program = way(exported).transform([AddToSub()]).exported_program().module()
        found.append([program(x) for _ in range(2)])
    torch.testing.assert_close(found[0], found[1])


def test_passes_run_after_partitioners_too(exported):
    x = torch.randn(4, 4)
    taken = RunPartitioner(lambda node: node.target is torch.ops.aten.addmm.default)
    manager = to_edge(exported).to_backend(taken).transform([SinToCos()])
    program = manager.exported_program().module()
    torch.testing.assert_close([program(x) for _ in range(2)], wanted(x, to_cos))
