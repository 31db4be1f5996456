"""Operators that hold graphs: control flow, scans, vmap, modes, hints, autograd functions."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import export
from torch.nn.attention.flex_attention import flex_attention
from unflatten_comparison import check, compare, programs  # type: ignore[import-not-found]

from lowerdeck.unflatten import UnsupportedProgramError, unflatten

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module

# torch's own: operators with graphs compile themselves when eager runs them.
pytestmark = pytest.mark.filterwarnings("ignore")

X = torch.arange(12.0).reshape(3, 4) / 6 - 1


class Around(Model):
    """Calls the same inner module twice between layers of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.inner = inner
        self.after = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.after(self.inner(self.inner(self.before(x)).sin()))


class Branches(Model):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        def right(y: Tensor) -> Any:
            return torch.cond(y.max() > 0, lambda z: z * 2, self.b, (y,))

        return torch.cond(x.sum() > 0, self.a, right, (x,))


class Loop(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("step", torch.tensor(1))

    def forward(self, x: Tensor) -> Any:
        def body(left: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return left - self.step, self.fc(y)

        loop: Any = while_loop
        return loop(lambda left, _: left > 0, body, (self.step + 2, x))[1]


class Map(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        over: Any = map_rows
        return over(lambda row, shift: self.fc(row) + shift, x, x[0].clone())


class Scan(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        carry, rows = scan(lambda seen, row: (seen + self.fc(row), seen * row), x[0], x)
        return rows + carry


class AssociativeScan(Model):
    def forward(self, x: Tensor) -> Any:
        return associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")


class Region(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Any:
        return self.fc(x)


_INNER = (Branches, Loop, Map, Scan, AssociativeScan, Region)


def _check_inner(inner: type, form: str) -> None:
    # No gradients: eager cannot compute them through some of these.
    model = Around(inner()).requires_grad_(False)
    for module in check(model, (X,), calls=1, forms=(form,)).values():
        calls = [node.target for node in module.graph.find_nodes(op="call_module")]
        assert calls == ["before", "inner", "inner", "after"]


@pytest.mark.parametrize("inner", _INNER, ids=lambda cls: cls.__name__)
def test_an_operator_with_graphs_is_in_the_module_that_calls_it(inner: type) -> None:
    _check_inner(inner, "non-strict")


# Eager compiles most of these operators, which takes seconds.
@pytest.mark.heavy
@pytest.mark.parametrize("form", ["non-strict decomposed", "strict", "strict decomposed"])
@pytest.mark.parametrize("inner", _INNER, ids=lambda cls: cls.__name__)
def test_operators_with_graphs_in_every_form(inner: type, form: str) -> None:
    _check_inner(inner, form)


class Attention(Model):
    def forward(self, x: Tensor) -> Any:
        return flex_attention(x, x, x, score_mod=lambda score, b, h, q, k: score + (q - k))


def test_flexible_attention() -> None:
    x = X.reshape(1, 1, 3, 4)
    module = unflatten(export(nn.Sequential(Attention(), Attention()), (x,)))

    def attend(y: Tensor) -> Tensor:
        positions = torch.arange(3.0)
        scores = y @ y.transpose(2, 3) / 2 + positions[:, None] - positions
        return scores.softmax(3) @ y

    torch.testing.assert_close(module(x), attend(attend(x)))


class Vmap(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        rows = torch.vmap(lambda row: self.fc(row).cumsum(0) + row.sum())(x)
        return torch.vmap(torch.vmap(lambda value: value * 2))(rows)


@pytest.mark.parametrize("form", ["non-strict", "non-strict decomposed"])
def test_vmap_inside_a_module(form: str) -> None:
    # torch.export itself refuses a layer inside of vmap in strict mode.
    model = Around(Vmap())
    program = programs(model, (X,), forms=(form,))[form]
    text = str(program.graph)
    compare(copy.deepcopy(model), unflatten(program), (X,))
    assert str(program.graph) == text
    torch.testing.assert_close(program.module()(X), model(X))


class Modes(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.inner = Half()

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.inner(self.fc(x))
            with torch.autocast("cpu", enabled=False):
                z = self.fc(x)
        with torch.no_grad():
            w = self.inner(x)
            with torch.enable_grad():
                w = self.fc(w)
        return y.float() + z + w


class Half(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        return self.fc(x).float()


@pytest.mark.parametrize("form", ["non-strict", "non-strict decomposed"])
def test_modes_inside_each_other_and_around_modules(form: str) -> None:
    # Strict export of torch 2.13 loses autocast around a function decorated with no_grad.
    model = Around(Modes())
    program = programs(model, (X,), forms=(form,))[form]
    module, flat = unflatten(program), program.module()
    compare(model, module, (X,), calls=1)
    weights = ("inner.fc.weight", "before.bias")
    found, expected = (
        torch.autograd.grad(subject(X).sum(), [subject.get_parameter(name) for name in weights])
        for subject in (module, flat)
    )
    torch.testing.assert_close(found, expected)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2


class UsesFunction(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return Doubled.apply(self.fc(x))  # type: ignore[no-untyped-call]


def test_a_custom_autograd_function_adds_no_module() -> None:
    # Strict export writes the name of its own wrapper into the stacks of such nodes.
    for module in check(Around(UsesFunction()), (X,), calls=1).values():
        calls = [node.target for node in module.graph.find_nodes(op="call_module")]
        assert calls == ["before", "inner", "inner", "after"]


def test_a_module_of_the_users_may_have_the_name_of_exports_wrapper() -> None:
    class Odd(Model):
        def __init__(self) -> None:
            super().__init__()
            self._export_root = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self._export_root(x)

    check(Odd(), (X,), forms=("non-strict", "non-strict decomposed"))


def test_hints_that_export_keeps_as_an_operator() -> None:
    # torch 2.13 traces the body of a hint with values of its own; a pass adds hints afterwards.
    model = Around(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    program = export(model, (X,))
    graph = program.graph
    body = torch.fx.Graph()
    body.output(body.call_function(torch.ops.aten.relu.default, (body.placeholder("x"),)))
    program.graph_module.hinted = torch.fx.GraphModule({}, body)
    for relu in graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        with graph.inserting_before(relu):
            held = graph.get_attr("hinted")
            held.meta["nn_module_stack"] = relu.meta["nn_module_stack"]
        relu.args, relu.kwargs = (held, relu.args, {}), {"hints": {"fuse": True}}
        relu.target = hints_wrapper
    module: Any = unflatten(program)
    torch.testing.assert_close(module(X), model(X))
    (hint,) = module.inner.get_submodule("1").graph.find_nodes(
        op="call_function", target=hints_wrapper
    )
    assert hint.kwargs == {"hints": {"fuse": True}}
    torch.testing.assert_close(copy.deepcopy(module)(X), model(X))


def test_what_a_transform_leaves_behind_is_refused() -> None:
    """torch.export keeps tensors of a level of torch.func.grad, which has ended, as constants."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.constant = torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.constant

    kept: list[Tensor] = []

    def total(x: Tensor) -> Tensor:
        kept.append(x)
        return x.sum()

    # Exporting a model that calls torch.func.grad would leave this process in that level.
    program = export(Adds(), (X,))
    torch.func.grad(total)(torch.ones(4))
    program.constants["constant"] = kept[0]
    with pytest.raises(UnsupportedProgramError, match=r"'constant', .* torch\.func\.vjp"):
        unflatten(program)
