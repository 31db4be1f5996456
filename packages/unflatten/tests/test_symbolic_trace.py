"""``torch.fx.symbolic_trace`` goes through unflattened modules, and holds what they compute."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.fx import PH, symbolic_trace  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree
from unflatten_comparison import FORMS, assert_equal, programs  # type: ignore[import-not-found]

from lowerdeck.unflatten import (
    FlatArgsAdapter,
    InputConstraintError,
    InputStructureError,
    unflatten,
)

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module


class Scaled(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: int = 2, *, shift: Any = None) -> Any:
        y = self.fc(x).view(-1, 2, 2).expand(2, 2, 2).reshape(2, 4) * scale
        return y if shift is None else (y + shift["by"], [shift["twice"][0]])


class Structured(Model):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Scaled(), Scaled()

    def forward(self, x: Tensor, parts: Any, scale: float = 1.0) -> Any:
        y = self.one(x, 3) + parts["a"][0].float().float()
        other = y.neg()
        y, (z,) = self.two(y, shift={"by": parts["a"][1], "twice": (x, other)})
        return {"y": self.one(y, 2) * scale, "z": z + other}


class Counts(Model):
    """Writes its buffers before it reads them, in a child too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("rows", torch.zeros(2, 4))
        self.register_buffer("type_name", torch.zeros(()))
        self.plain = torch.ones(4)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        self.rows[0] = y[1].detach()
        self.rows.view(-1)[3] = 9.0
        count: Any = self._buffers["type_name"]
        count.add_(1)
        return y + self.rows * count + self.plain


X = torch.randn(2, 4)
PARTS = {"a": [X + 1, X + 2]}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("preserved", [(), ("one", "two")], ids=["flat", "preserved"])
def test_a_trace_with_and_without_concrete_arguments(form: str, preserved: tuple[str]) -> None:
    eager = Structured()
    options = {"forms": (form,), "preserve_module_call_signature": preserved}
    program = programs(eager, (X, PARTS, 0.5), **options)[form]
    wanted = eager(X, PARTS, 0.5)
    concrete: dict[str, Any] = {"scale": 0.5}
    # Eager takes a proxy apart as it does a dict.
    assert_equal(symbolic_trace(unflatten(program), concrete)(X, PARTS, 0.5), wanted)
    concrete["parts"] = pytree.tree_map(lambda _: PH, PARTS)
    assert_equal(symbolic_trace(unflatten(program), concrete)(X, PARTS, 0.5), wanted)
    in_order: Any = (PH, concrete["parts"], 0.5)
    assert_equal(symbolic_trace(unflatten(program), in_order)(X, PARTS, 0.5), wanted)


@pytest.mark.parametrize("form", FORMS)
def test_a_preserved_child_is_traced_alone(form: str) -> None:
    eager = Structured()
    options = {"forms": (form,), "preserve_module_call_signature": ("one", "two")}
    module: Any = unflatten(programs(eager, (X, PARTS), **options)[form])
    traced = symbolic_trace(module.two, {"shift": {"by": PH, "twice": (PH, PH)}})
    shift = {"by": X, "twice": (X, X)}
    assert_equal(traced(X, shift), eager.two(X, shift=shift))
    traced = symbolic_trace(module.one, {"scale": 3})
    assert_equal(traced(X, 3), eager.one(X, 3))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("train", [True, False])
def test_a_trace_holds_the_writes_of_buffers(form: str, train: bool) -> None:
    # Eager's own trace runs them once, while it traces.
    eager = Counts().train(train)
    module = unflatten(programs(eager, (X,), forms=(form,))[form])
    before = copy.deepcopy(dict(module.state_dict()))
    traced: Any = symbolic_trace(module)
    assert_equal(dict(module.state_dict()), before)
    for _ in range(3):
        x = torch.randn(2, 4)
        assert_equal(traced(x), eager(x))
        assert_equal(dict(module.state_dict()), dict(eager.state_dict()))
    traced.graph.eliminate_dead_code()
    traced.recompile()
    assert_equal(traced(X), eager(X))
    assert_equal(dict(module.state_dict()), dict(eager.state_dict()))


def test_keywords_that_python_cannot_spell_are_traced() -> None:
    class Keywords(Model):
        def forward(self, x: Tensor, **others: Any) -> Any:
            return x + others["a-b"] * others["c"]

    options = {"a-b": X + 1, "c": X + 2}
    module = unflatten(export(Keywords(), (X,), options))
    assert_equal(symbolic_trace(module)(X, **options), Keywords()(X, **options))


def test_symbolic_sizes_are_traced() -> None:
    class Sizes(Model):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return x.reshape(x.shape[0] * 2, -1).sum(1) * y.shape[0]

    rows = Dim("rows")
    program = export(Sizes(), (X, X), dynamic_shapes=({0: rows}, {0: rows}))
    traced = symbolic_trace(unflatten(program))
    for count in (2, 5):
        x = torch.randn(count, 4)
        assert_equal(traced(x, x), Sizes()(x, x))


def test_a_constant_that_a_trace_would_ignore_is_refused() -> None:
    module = unflatten(export(Scaled(), (X, 3)))
    with pytest.raises(InputConstraintError, match=r"'scale' was .* constant 3; .*concrete_args"):
        symbolic_trace(module)
    with pytest.raises(InputConstraintError, match="'scale' was exported as the constant 3"):
        symbolic_trace(module, {"scale": 4})


class Takes(FlatArgsAdapter):
    def adapt(
        self, target_spec: Any, input_spec: Any, input_args: list[Any], *_: Any, **__: Any
    ) -> list[Any]:
        return input_args[: target_spec.num_leaves]


def test_a_trace_goes_through_an_adapter_where_arguments_are_given_one_by_one() -> None:
    module = unflatten(export(nn.Sequential(nn.Linear(4, 4)), (X,)), Takes())
    leaves: Any = (PH, PH)
    traced = symbolic_trace(module, leaves)
    assert_equal(traced(X, X), module(X, X))
    with pytest.raises(InputStructureError, match="concrete_args"):
        symbolic_trace(module)


def test_a_structure_that_hides_its_leaves_is_refused() -> None:
    class Pair(tuple[Any, ...]):
        __slots__ = ()

    def keyed(pair: Pair) -> Any:
        return [(pytree.SequenceKey(index), part) for index, part in enumerate(pair)], None

    pytree.register_pytree_node(
        Pair,
        lambda pair: (list(pair), None),
        lambda leaves, _: Pair(leaves),
        flatten_with_keys_fn=keyed,
    )

    class Adds(Model):
        def forward(self, pair: Any) -> Any:
            return pair[0] + pair[1]

    module = unflatten(export(Adds(), (Pair([X, X]),), strict=False))
    traced = symbolic_trace(module, {"pair": Pair([PH, PH])})
    assert_equal(traced(Pair([X, X])), X + X)
    with pytest.raises(InputStructureError, match=r"'pair' is a Proxy .*concrete_args"):
        symbolic_trace(module)
