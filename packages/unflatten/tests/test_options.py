"""What unflatten offers beyond torch's."""

from __future__ import annotations

import copy
import operator
import pickle
import traceback
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import export
from unflatten_comparison import compare, programs  # type: ignore[import-not-found]

from lowerdeck.unflatten import UnsupportedProgramError, unflatten

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module


class Stateful(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(2))
        self.bn = nn.BatchNorm1d(2)
        self.note = "kept"

    def forward(self, x: Tensor) -> Any:
        old = self.state.clone()
        self.state.add_(x.detach().mean(0))
        return self.bn(x) + old


class Outer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Stateful(), Stateful()])

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        x.add_(1)
        return x


def test_functional_graphs_stay_functional() -> None:
    eager, x = Outer(), torch.randn(3, 2)
    form = "non-strict decomposed"
    program = programs(eager, (x,), forms=(form,))[form]
    module = unflatten(program, inplace=False)
    for inner in module.modules():
        nodes = getattr(inner, "graph", torch.fx.Graph()).nodes
        targets = [node.target for node in nodes if node.op == "call_function"]
        assert not any(
            getattr(target, "_schema", None) and target._schema.is_mutable for target in targets
        )
    compare(copy.deepcopy(eager), module, (x,))


@pytest.mark.parametrize("with_eager", [False, True])
def test_children_get_their_eager_types(with_eager: bool) -> None:
    eager, x = Outer(), torch.randn(3, 2)
    module: Any = unflatten(export(eager, (x,)), restore_types=eager if with_eager else True)
    assert isinstance(module.layers[0].bn, nn.BatchNorm1d)
    if with_eager:
        assert isinstance(module.layers, nn.ModuleList)
        assert module.layers[1].note == "kept"
        assert module.layers[0].bn.num_features == 2
    assert "BatchNorm1d(" in repr(module)
    compare(copy.deepcopy(eager), copy.deepcopy(module), (x,))
    compare(copy.deepcopy(eager), module, (x,))


class Bare(Model):
    """Layers of torch's that are made without what others of their class have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4, bias=False)
        self.bare = nn.LayerNorm(4, elementwise_affine=False)
        self.conv = nn.Conv1d(3, 3, 1, bias=False)
        self.batch = nn.BatchNorm1d(3, affine=False)
        self.attention = nn.MultiheadAttention(4, 2, bias=False)

    def forward(self, x: Tensor) -> Any:
        x = self.batch(self.conv(self.bare(self.norm(self.linear(x)))))
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("with_eager", [False, True])
def test_layers_have_what_they_are_made_without(with_eager: bool) -> None:
    """Code asks for it: quantisation for ``linear.bias``, attention for its own text."""
    eager, x = Bare().eval(), torch.randn(2, 3, 4)
    made: Any = unflatten(export(eager, (x,)), restore_types=eager if with_eager else True)
    assert made.linear.bias is made.conv.bias is made.norm.bias is made.batch.weight is None
    assert made.bare.weight is made.bare.bias is None
    assert list(made.state_dict()) == list(eager.state_dict())
    assert "MultiheadAttention" in repr(made)
    compare(copy.deepcopy(eager), made, (x,))


def test_a_factory_replaces_children() -> None:
    eager, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.randn(1, 2)
    names: list[str] = []

    def factory(name: str, module: nn.Module) -> nn.Module:
        names.append(name)
        return nn.Tanh() if name == "1" else module

    module = unflatten(export(eager, (x,)), module_factory=factory)
    torch.testing.assert_close(module(x), eager[0](x).tanh())
    assert names == ["1", "0"]


def test_an_edit_of_the_graph_takes_effect_after_recompile() -> None:
    eager, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.randn(1, 2)
    module: Any = unflatten(export(eager, (x,)))
    relu = module[1] if hasattr(type(module), "__getitem__") else module.get_submodule("1")
    (node,) = relu.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    node.target = torch.ops.aten.tanh.default
    torch.testing.assert_close(module(x), eager(x))
    relu.recompile()
    torch.testing.assert_close(module(x), eager[0](x).tanh())
    assert "_tanh(" in relu.code


def test_an_error_shows_the_models_own_line() -> None:
    class Fails(Model):
        def forward(self, x: Tensor) -> Any:
            return x.reshape(3, 2) + 1  # the line to be shown

    module = unflatten(export(Fails(), (torch.ones(6),), strict=False))
    module.check_input_constraints = False
    with pytest.raises(RuntimeError) as caught:
        module(torch.ones(5))
    text = "".join(traceback.format_exception(caught.value))
    assert "return x.reshape(3, 2) + 1" in text
    assert "test_options.py" in text


def test_the_tree_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    module = unflatten(export(Outer(), (torch.randn(3, 2),)))
    text = module.print_readable(print_output=False)
    assert capsys.readouterr().out == ""
    assert "# layers.0.bn: torch.nn.modules.batchnorm.BatchNorm1d" in text
    assert module.print_readable() + "\n" == capsys.readouterr().out
    assert "bn: torch.nn.modules.batchnorm.BatchNorm1d, 9 elements" in module.tree_summary()


def test_nodes_without_a_module_go_to_the_common_ancestor_of_their_neighbours() -> None:
    eager, x = (
        nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Tanh()),
        torch.ones(1, 2),
    )
    program = export(eager, (x,))
    graph = program.graph
    (relu,) = graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    with graph.inserting_before(relu):
        added = graph.call_function(torch.ops.aten.neg.default, (relu.args[0],))
    relu.args = (added,)
    module: Any = unflatten(program)
    torch.testing.assert_close(module(x), torch.relu(-eager.get_submodule("0.0")(x)).tanh())
    inner = module.get_submodule("0").graph
    assert inner.find_nodes(op="call_function", target=torch.ops.aten.neg.default)


class Doubles:
    """What torch runs in eager mode in place of a delegate."""

    def module(self) -> Any:
        return lambda x: (x * 2,)


class LoweredBackendModule(nn.Module):
    """What torch's verifier and operator take for a delegate."""

    def __init__(self) -> None:
        super().__init__()
        self.backend_id, self.processed_bytes = "demo", b""
        self.compile_specs: list[Any] = []
        self.original_module = Doubles()


def test_a_delegate_is_called_where_it_is() -> None:
    from torch._higher_order_ops.executorch_call_delegate import executorch_call_delegate

    eager, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    program = export(eager, (x,))
    program.graph_module.lowered = LoweredBackendModule()
    graph = program.graph
    (relu,) = graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    with graph.inserting_before(relu):
        lowered = graph.get_attr("lowered")
        call = graph.call_function(executorch_call_delegate, (lowered, relu.args[0]))
        result = graph.call_function(operator.getitem, (call, 0))
    relu.args = (result,)
    module = unflatten(program)
    torch.testing.assert_close(module(x), torch.relu(eager[0](x) * 2))


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_a_restored_module_pickles() -> None:
    eager, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    module = unflatten(export(eager, (x,)), restore_types=eager)
    again: Any = pickle.loads(pickle.dumps(module))
    torch.testing.assert_close(again(x), eager(x))
    assert isinstance(again.get_submodule("0"), nn.Linear)


@pytest.mark.parametrize("wrong", [nn.ReLU(), None])
def test_what_is_no_program_is_refused_in_words(wrong: Any) -> None:
    with pytest.raises(
        UnsupportedProgramError, match=r"expected an ExportedProgram; found a .*\."
    ):
        unflatten(wrong)


@pytest.mark.parametrize("wrong", [3, "all", nn.Linear])
def test_what_restores_no_types_is_refused_in_words(wrong: Any) -> None:
    program = export(nn.ReLU(), (torch.ones(1),))
    with pytest.raises(UnsupportedProgramError, match="expected restore_types to be"):
        unflatten(program, restore_types=wrong)
