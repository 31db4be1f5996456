"""Expectations of torch's private parts; a new torch that breaks one fails here."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, symbolic_trace

from lowerdeck.graph_fuser import _torch_private as private
from lowerdeck.torch_base import LazyGraphModule


def test_a_subclass_of_graph_module_keeps_its_class() -> None:
    program = torch.export.export(torch.nn.Sigmoid(), (torch.ones(1),))
    module = program.module()
    assert isinstance(module, GraphModule)
    kind = type(module)
    next(n for n in module.graph.nodes if n.name == "sigmoid").target = torch.ops.aten.cos.default
    private.defer_code(module)
    assert type(module) is kind
    torch.testing.assert_close(module(torch.ones(1)), torch.ones(1).cos())


def test_deferred_code_is_fresh_wherever_it_is_read() -> None:
    def edited() -> GraphModule:
        gm = symbolic_trace(lambda x: x.sin())
        next(n for n in gm.graph.nodes if n.op == "call_method").target = "cos"
        private.defer_code(gm)
        return gm

    assert "cos" in edited().code
    assert "cos" in str(edited())
    assert "cos" in edited().__reduce__()[1][0]["_code"]
    torch.testing.assert_close(edited()(torch.ones(1)), torch.ones(1).cos())
    torch.testing.assert_close(edited().forward(torch.ones(1)), torch.ones(1).cos())


def test_torchs_own_lazy_module_keeps_its_ways() -> None:
    gm = symbolic_trace(lambda x: x.sin())
    lazy = LazyGraphModule(gm, gm.graph)
    lazy(torch.ones(1))
    next(n for n in lazy.graph.nodes if n.op == "call_method").target = "cos"
    private.defer_code(lazy)
    torch.testing.assert_close(lazy(torch.ones(1)), torch.ones(1).cos())
    private.defer_code(lazy)
    private.generate_code(lazy)
    assert "cos" in lazy.code
