"""Programs quantised as pt2e does: passes add nodes that name no module between the modules."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines quantized_decomposed
from torch import Tensor, nn
from torch.export import ExportedProgram
from unflatten_comparison import FORMS, programs  # type: ignore[import-not-found]

from lowerdeck.unflatten import export_preserving, unflatten

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module

_Q = torch.ops.quantized_decomposed
_LAYERS = {
    torch.ops.aten.conv2d.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten.linear.default,
    torch.ops.aten.addmm.default,
}


class Block(Model):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.bn = nn.BatchNorm2d(2)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return x + self.fc(self.bn(self.conv(x)).relu())


class Net(Model):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU())
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.blocks[0](x).mean(2))


def _quantise(program: ExportedProgram) -> ExportedProgram:
    """Put a pair of nodes without a module before the data of each layer, as a pass would."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.target not in _LAYERS:
            continue
        data = node.args[1] if node.target is torch.ops.aten.addmm.default else node.args[0]
        with graph.inserting_before(node):
            numbers = (0.05, 3, -128, 127, torch.int8)
            quantise = _Q.quantize_per_tensor.default
            small = graph.call_function(quantise, (data, *numbers))
            dequantise = _Q.dequantize_per_tensor.default
            large = graph.call_function(dequantise, (small, *numbers))
        node.replace_input_with(data, large)
    program.graph_module.recompile()
    return program


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_program_keeps_its_hierarchy(form: str) -> None:
    eager, x = Net().eval(), torch.randn(2, 1, 4, 4)
    program = _quantise(programs(eager, (x,), forms=(form,))[form])
    module: Any = unflatten(program)
    with torch.no_grad():
        expected = program.module()(x)
        for _ in range(2):
            torch.testing.assert_close(module(x), expected)
        torch.testing.assert_close(copy.deepcopy(module)(x), expected)
    assert list(module.state_dict()) == list(eager.state_dict())
    names = [name for name, _ in eager.named_modules()]
    assert [name for name, _ in module.named_modules()] == names
    calls = [node.target for node in module.graph.find_nodes(op="call_module")]
    assert calls == ["stem", "blocks.0", "blocks.1", "blocks.0", "head"]


@pytest.mark.parametrize("preserve", [None, "all"])
@pytest.mark.parametrize("form", FORMS)
def test_what_a_pass_says_the_outermost_module_computes_between_nodes_of_a_call(
    form: str, preserve: Any
) -> None:
    """So it is after quantising a graph and exporting that; the call takes these nodes in."""
    eager, x = Net().eval(), torch.randn(2, 1, 4, 4)
    program = _quantise(programs(eager, (x,), forms=(form,))[form])
    for node in program.graph.nodes:
        if node.op == "call_function" and "nn_module_stack" not in node.meta:
            node.meta["nn_module_stack"] = {"L__self__": ("", "Net")}
    made: Any = unflatten(program, preserve=preserve)
    expected = program.module()(x)
    for module in (made, copy.deepcopy(made)):
        torch.testing.assert_close(module(x), expected)
    made.blocks[0].register_forward_hook(lambda _module, _args, result: result * 2)
    assert not torch.equal(made(x), expected)


def test_nodes_in_a_row_are_where_all_their_neighbours_are() -> None:
    eager, x = Net().eval(), torch.randn(2, 1, 4, 4)
    program = _quantise(programs(eager, (x,), forms=("non-strict",))["non-strict"])
    module: Any = unflatten(program)

    def added(subject: Any) -> int:
        targets = (_Q.quantize_per_tensor.default, _Q.dequantize_per_tensor.default)
        return sum(node.target in targets for node in subject.graph.nodes)

    # Between two modules: in the one that calls both. Before the layer within a block: there.
    assert added(module) == 8
    assert added(module.blocks[1]) == 2
    assert added(module.blocks[1].fc) == 0


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Please use quant_min:UserWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", ["qat", "dynamic"])
def test_eager_quantisation_takes_layers_of_eager_that_were_put_back(how: str) -> None:
    # It looks for exact types, which generated modules have not.
    eager = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    x = torch.randn(3, 8)
    module: Any = unflatten(export_preserving(eager, (x,)))
    for path, layer in eager.named_children():
        module.set_submodule(path, copy.deepcopy(layer))
    found = []
    quantization: Any = torch.ao.quantization
    for model in (module, copy.deepcopy(eager)):
        if how == "qat":
            model.train().qconfig = quantization.get_default_qat_qconfig("x86")
            made = quantization.prepare_qat(model)
            assert type(made.get_submodule("0")) is torch.ao.nn.qat.Linear
        else:
            made = quantization.quantize_dynamic(model, {torch.nn.Linear})
            assert type(made.get_submodule("0")) is torch.ao.nn.quantized.dynamic.Linear
        found.append(made(x))
    torch.testing.assert_close(*found)
    assert not torch.equal(found[0], eager(x))
