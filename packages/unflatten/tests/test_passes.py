"""Programs that passes rewrote: nodes without a module, between modules, in another order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines quantized_decomposed
from torch import Tensor, nn
from torch.export import ExportedProgram, export
from unflatten_zoo import Case  # type: ignore[import-not-found]
from unflatten_zoo.judges import replace  # type: ignore[import-not-found]

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten

pytestmark = pytest.mark.filterwarnings("ignore")

_Q = torch.ops.quantized_decomposed
_LAYERS = {
    torch.ops.aten.conv2d.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten.linear.default,
    torch.ops.aten.addmm.default,
}
ATEN = torch.ops.aten
X = torch.linspace(-1, 1, 8).view(2, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = (
            nn.Conv2d(2, 2, 3, padding=1),
            nn.BatchNorm2d(2),
            nn.Linear(4, 4),
        )

    def forward(self, x: Tensor) -> Any:
        return x + self.fc(self.bn(self.conv(x)).relu())


class Net(nn.Module):
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


NET = Case("net", Net, lambda: (torch.randn(2, 1, 4, 4),))
CALLS = ["stem", "blocks.0", "blocks.1", "blocks.0", "head"]


def quantise(program: ExportedProgram) -> ExportedProgram:
    """Put a pair of nodes without a module before the data of each layer, as pt2e does."""
    program = copy.deepcopy(program)
    graph = program.graph
    numbers = (0.05, 3, -128, 127, torch.int8)
    for node in list(graph.nodes):
        if node.target not in _LAYERS:
            continue
        data = node.args[1] if node.target is ATEN.addmm.default else node.args[0]
        with graph.inserting_before(node):
            small = graph.call_function(_Q.quantize_per_tensor.default, (data, *numbers))
            large = graph.call_function(_Q.dequantize_per_tensor.default, (small, *numbers))
        node.replace_input_with(data, large)
    program.graph_module.recompile()
    return program


@pytest.mark.parametrize("preserve", [None, "all"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("way", ["plain", "strict", "decomposed"])
def test_a_quantised_program_keeps_its_hierarchy(way: str, stacked: bool, preserve: Any) -> None:
    program = quantise(NET.program(way))
    for node in program.graph.nodes:
        if stacked and node.op == "call_function" and "nn_module_stack" not in node.meta:
            # As after an export of the quantised graph.
            node.meta["nn_module_stack"] = {"L__self__": ("", "Net")}
    module: Any = unflatten(program, preserve=preserve)
    x = NET.calls()[0].args[0]
    with torch.no_grad():
        expected = program.module()(x)
        for subject in (module, copy.deepcopy(module), module):
            torch.testing.assert_close(subject(x), expected)
    eager = NET.module()
    assert list(module.state_dict()) == list(eager.state_dict())
    names = [name for name, _ in eager.named_modules()]
    assert [name for name, _ in module.named_modules()] == names
    assert [node.target for node in module.graph.find_nodes(op="call_module")] == CALLS


@pytest.mark.parametrize("how", ["qat", "dynamic"])
def test_eager_quantisation_takes_eager_layers_that_were_put_back(how: str) -> None:
    # It looks for exact types, which generated modules have not.
    eager = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
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
            made = quantization.quantize_dynamic(model, {nn.Linear})
            assert type(made.get_submodule("0")) is torch.ao.nn.quantized.dynamic.Linear
        found.append(made(x))
    torch.testing.assert_close(*found)
    assert not torch.equal(found[0], eager(x))


class FakeQuantised(nn.Module):
    """A layer with its weight and its argument quantised as in training."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        def rounded(value: Tensor) -> Tensor:
            scale = value.detach().abs().max() / 127
            return torch.fake_quantize_per_tensor_affine(value, float(scale), 0, -128, 127)

        return nn.functional.linear(rounded(x), rounded(self.inner.weight), self.inner.bias)


def test_layers_are_fake_quantised_and_train() -> None:
    eager = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    module = unflatten(export_preserving(eager, (X,)))
    for path in ("0", "2"):
        for model in (module, eager):
            layer: Any = model.get_submodule(path)
            plain = nn.Linear(4, layer.weight.shape[0])
            plain.load_state_dict(layer.state_dict())
            replace(model, path, FakeQuantised(plain))
    for model in (module, eager):
        model(X).square().sum().backward()
    torch.testing.assert_close(module(X), eager(X))
    grads = dict(module.named_parameters())
    for name, value in eager.named_parameters():
        torch.testing.assert_close(grads[name].grad, value.grad)


def test_torchao_quantises_layers_in_place() -> None:
    torchao: Any = pytest.importorskip("torchao.quantization")
    eager = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    x = torch.randn(4, 32)
    module: Any = unflatten(export_preserving(eager, (x,)))
    for path, layer in eager.named_children():
        module.set_submodule(path, copy.deepcopy(layer))
    for model in (module, eager):
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    torch.testing.assert_close(module(x), eager(x))


class TwoHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.b = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        return self.a(x) + self.b(x)


def halves() -> tuple[Any, ExportedProgram, list[Any], list[Any]]:
    eager = TwoHalves()
    program = export(eager, (X,))
    linears = program.graph.find_nodes(op="call_function", target=ATEN.linear.default)
    relus = program.graph.find_nodes(op="call_function", target=ATEN.relu.default)
    return eager, program, list(linears), list(relus)


def test_calls_whose_nodes_alternate_stay_one_call_each() -> None:
    eager, program, linears, relus = halves()
    relus[0].prepend(linears[1])
    module = unflatten(program)
    torch.testing.assert_close(module(X), eager(X))
    calls = [str(node.target) for node in module.graph.find_nodes(op="call_module")]
    assert sorted(calls) == ["a", "b"]


def test_calls_whose_nodes_depend_on_each_other_are_inlined() -> None:
    eager, program, linears, relus = halves()
    relus[0].prepend(linears[1])
    # Each module's second node now reads the other's first.
    relus[0].args, relus[1].args = (linears[1],), (linears[0],)
    expected = torch.relu(eager.b[0](X)) + torch.relu(eager.a[0](X))
    module = unflatten(program)
    torch.testing.assert_close(module(X), expected)
    for path in ("a", "b"):
        with pytest.raises(UnflattenError, match="interrupted"):
            module.set_submodule(path, nn.ReLU())


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Any:
        return self.block(x).sigmoid()


@pytest.mark.parametrize("preserved", [(), ("block",)])
def test_nodes_that_lost_their_module_stay_in_the_call_around_them(
    preserved: tuple[str, ...],
) -> None:
    eager = Outer()
    program = export(eager, (X,), preserve_module_call_signature=preserved)
    root = next(iter(program.graph.find_nodes(op="output"))).all_input_nodes[0]
    for node in program.graph.nodes:
        if node.target in {ATEN.relu.default, ATEN.tanh.default}:
            # As decomposing an autocast region leaves them.
            node.meta["nn_module_stack"] = dict(root.meta["nn_module_stack"])
    module: Any = unflatten(program)
    torch.testing.assert_close(module(X), eager(X))
    assert [node.target for node in module.graph.find_nodes(op="call_module")] == ["block"]
    if preserved:
        other = Outer()
        module.block = other.block
        torch.testing.assert_close(module(X), other(X))


def test_a_node_without_a_module_goes_where_its_neighbours_are() -> None:
    eager = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Tanh())
    program = export(eager, (X,))
    (relu,) = program.graph.find_nodes(op="call_function", target=ATEN.relu.default)
    with program.graph.inserting_before(relu):
        added = program.graph.call_function(ATEN.neg.default, (relu.args[0],))
    relu.args = (added,)
    module: Any = unflatten(program)
    torch.testing.assert_close(module(X), torch.relu(-eager.get_submodule("0.0")(X)).tanh())
    inner = module.get_submodule("0").graph
    assert inner.find_nodes(op="call_function", target=ATEN.neg.default)
