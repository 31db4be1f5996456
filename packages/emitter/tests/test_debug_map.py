"""Instructions are followed back to the user's code, through decomposition and delegates."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from lowerdeck.emitter import EmitConfig, emit
from lowerdeck_zoo import Holding, Of, exported


class Block(Holding, linear=lambda: nn.Linear(3, 3)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(self.linear(x))


class Model(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> Any:
        return self.block(x) + 1


def program() -> ExportedProgram:
    return exported(Model(Block()), torch.ones(2, 3))


def test_each_instruction_knows_its_line_and_module() -> None:
    emitted = emit(program())
    sources = emitted.debug_handle_map["forward"]
    assert [source.operator for source in sources.values()] == [
        "aten::linear.out",
        "aten::sigmoid.out",
        "aten::mul.out",
        "aten::add.Scalar_out",
    ]
    assert [source.results for source in sources.values()] == [1, 1, 1, 1]
    assert sources[0].module_path == "block.linear"
    assert sources[1].module_path == "block"
    # Also for a layer of torch's own: where it was called, and not where torch computes it.
    assert all("test_debug_map.py" in source.source_line for source in sources.values())
    # What one node was taken apart to has that node's handle.
    assert sources[1].handles == sources[2].handles
    assert len({source.handles for source in sources.values()}) == 3


def test_handles_of_the_caller_survive_decomposition_also_in_branches() -> None:
    branching = Of(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))
    model = exported(branching, torch.ones(3))
    graphs = [m.graph for m in model.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    expected = {100 + number for number, _ in enumerate(nodes)}
    for handle, node in zip(sorted(expected), nodes, strict=True):
        node.meta["debug_handle"] = handle
    sources = emit(model).debug_handle_map["forward"].values()
    found = {handle for source in sources for handle in source.handles}
    assert found <= expected
    kernels = {source.operator: source.handles for source in sources}
    assert kernels["aten::sin.out"] != kernels["aten::cos.out"]


def test_nodes_without_a_handle_get_one_that_is_free() -> None:
    model = program()
    first = next(node for node in model.graph.nodes if node.op == "call_function")
    first.meta["debug_handle"] = 7
    sources = emit(model).debug_handle_map["forward"]
    assert sources[0].handles == (7,)
    assert min(handle for i in (1, 2, 3) for handle in sources[i].handles) > 7


def test_a_delegates_map_and_inner_nodes_are_kept(lowered: Any) -> None:
    module = lowered(meta={"debug_handle_map": {0: (5,)}})
    inner = next(n for n in module.original_module.graph.nodes if n.op == "call_function")
    inner.meta["debug_handle"] = 5

    outer = Of(lambda self, x: self.inner(x)[0] + 1, inner=module)
    emitted = emit(exported(outer, torch.ones(2, 3), strict=False))
    (found,) = emitted.delegate_debug_maps["forward"].values()
    assert found.debug_handle_map == {0: (5,)}
    assert found.sources[5].operator == "aten.mul.Tensor"


def test_stack_traces_are_in_the_program_on_request() -> None:
    model = program()
    (plain,) = emit(model).program.execution_plan
    assert plain.chains[0].stacktrace is None
    (traced,) = emit(model, config=EmitConfig(stack_traces=True)).program.execution_plan
    trace = traced.chains[0].stacktrace
    assert trace is not None
    assert len(trace) == len(traced.chains[0].instructions)
    assert trace[0].items[-1].name == "forward"
    assert trace[0].items[-1].lineno > 0
    assert "silu" in trace[1].items[-1].context
