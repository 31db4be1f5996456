"""Modules that return their argument: who reads it, and who what they return, are told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten
from lowerdeck.unflatten.results.given_back import argument_of

Use = Callable[[nn.Module, Tensor], Any]

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda x: x.to(torch.float32),
    "to itself": lambda x: x.to(x),
    "cpu": lambda x: x.cpu(),
    "float": lambda x: x.float(),
    "copy": lambda x: x.to(torch.float32, copy=True),
    "double": lambda x: x.double(),
    "type_as": lambda x: x.type_as(x),
    "contiguous": lambda x: x.contiguous(),
    "dropout": lambda x: functional.dropout(x, 0.5, training=False),
    "dropout1d": lambda x: functional.dropout1d(x, 0.5, training=False),
    "dropout1d of nothing": lambda x: functional.dropout1d(x, 0.0, training=True),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.5, training=False),
    "alpha_dropout in training": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "feature_alpha_dropout": lambda x: functional.feature_alpha_dropout(x, 0.5, training=False),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, train=False)[0],
    "expand": lambda x: x.expand(2, 3, 4),
    "view": lambda x: x.view(2, 3, 4),
    "reshape": lambda x: x.reshape(2, 3, 4),
    "flatten": lambda x: x.flatten(1, 1),
    "flatten two": lambda x: x.flatten(1),
    "squeeze": lambda x: x.squeeze(),
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "positive": lambda x: +x,
    "real": lambda x: x.real,
    "conj": lambda x: x.conj(),
    "conj_physical": lambda x: x.conj_physical(),
    "resolve_conj": lambda x: x.resolve_conj(),
    "resolve_neg": lambda x: x.resolve_neg(),
    "atleast_1d": torch.atleast_1d,
    "atleast_2d": torch.atleast_2d,
    "atleast_3d": torch.atleast_3d,
    "broadcast_tensors": lambda x: torch.ops.aten.broadcast_tensors([x, x])[0],
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, 3, 4)),
    "sum_to_size": lambda x: x.sum_to_size(2, 3, 4),
    "to_dense": lambda x: x.to_dense(),
    "movedim": lambda x: x.movedim(0, 0),
    "slice": lambda x: x[:],
    "pad": lambda x: functional.pad(x, (0, 0)),
    "tanh": lambda x: x.tanh(),
    "add_": lambda x: x.add_(1),
}


class Applies(nn.Module):
    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.operator(x)


class ReadsBoth(nn.Module):
    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.child = Applies(operator)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.sin()
        y = self.child(x)
        return x.cos(), y


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_export_names_anew_is_known(operator: str) -> None:
    program = torch.export.export(ReadsBoth(OPERATORS[operator]), (torch.randn(2, 3, 4),))
    nodes = {str(node.target): node for node in program.graph.nodes}
    read = nodes["aten.cos.default"].args[0]
    if read is not nodes["aten.sin.default"]:
        assert argument_of(read) is nodes["aten.sin.default"]
    else:
        output = next(iter(program.graph.find_nodes(op="output"))).args[0][1]
        # A program without a contiguous of another version may have named it anew.
        assert argument_of(output) is None or operator == "contiguous"


def is_unread(child: nn.Module, x: Tensor) -> Any:
    child(x)
    return x * 2


def gives_its_size(child: nn.Module, x: Tensor) -> Any:
    y = child(x)
    return x * 2 / y.shape[1]


def is_read(child: nn.Module, x: Tensor) -> Any:
    return child(x) * 2


def is_read_beside_it(child: nn.Module, x: Tensor) -> Any:
    y = child(x)
    return x * 2 + y


def is_returned(child: nn.Module, x: Tensor) -> Any:
    y = child(x)
    return y, x * 2


def is_unread_and_it_is_returned(child: nn.Module, x: Tensor) -> Any:
    child(x)
    return x, x * 2


USES: tuple[Use, ...] = (
    *(is_unread, gives_its_size, is_read, is_read_beside_it),
    *(is_returned, is_unread_and_it_is_returned),
)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) * 1.5
        return result


class Other(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.5


def nothing(*_: Any) -> None:
    """Change nothing, as a hook."""


def put(holder: Any, way: str) -> None:
    if way == "swap":
        holder.child = Other()
    elif way == "wrap":
        holder.child = Around(holder.child)
    elif way == "hook":
        holder.child.register_forward_hook(lambda _, args, result: result * 1.5)
    elif way == "same":
        holder.child.register_forward_hook(lambda _, args, result: result.view_as(result))
    else:
        holder.child.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))


class Uses(nn.Module):
    def __init__(self, operator: str, use: Use) -> None:
        super().__init__()
        self.first, self.child = Applies(OPERATORS["tanh"]), Applies(OPERATORS[operator])
        self.use = use

    def forward(self, x: Tensor) -> Any:
        return self.use(self.child, self.first(x)), self.use(self.child, x)


class Model(nn.Module):
    """What is given to the child is computed outside of what calls it, and read there too."""

    def __init__(self, operator: str, use: Use) -> None:
        super().__init__()
        self.first = Applies(OPERATORS["tanh"])
        self.part = Uses(operator, use)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return self.part(x), x.cos()


def program_of(eager: nn.Module, x: Tensor, how: str) -> Any:
    if how == "preserving":
        return export_preserving(eager, (x,))
    names = [name for name, _ in eager.named_modules() if name] if how == "recorded" else []
    return torch.export.export(eager, (x,), preserve_module_call_signature=tuple(names))


@pytest.mark.parametrize("operator", ["to", "flatten", "atleast_2d", "dropout1d", "dropout"])
@pytest.mark.parametrize("way", ["swap", "wrap", "hook", "same", "before"])
@pytest.mark.parametrize(
    "how",
    [
        "preserving",
        *(pytest.param(how, marks=pytest.mark.heavy) for how in ("recorded", "plain", "all")),
    ],
)
def test_a_change_is_eagers_or_told(how: str, way: str, operator: str) -> None:
    x = torch.randn(2, 3, 4)
    # What nobody reads at all is not returned by a call of flat values.
    is_kept = operator != "dropout" or how in {"preserving", "recorded"}
    for use in USES if is_kept else (is_read, is_read_beside_it, is_returned):
        eager = Model(operator, use)
        program = program_of(eager, x, how)
        made: Any = unflatten(program, preserve="all" if how == "all" else None)
        try:
            for model in (eager, made):
                put(model.part, way)
            found = made(x)
        except UnflattenError:
            assert how != "preserving", use
            assert way != "same", use
            continue
        for one, two in zip(pytree.tree_leaves(found), pytree.tree_leaves(eager(x)), strict=True):
            assert torch.equal(one, two), use


def test_a_change_is_looked_at_after_another_and_after_a_copy(tmp_path: Any) -> None:
    x = torch.randn(2, 3, 4)
    made: Any = unflatten(torch.export.export(Model("to", is_unread), (x,)))
    made.part.register_forward_hook(nothing)
    made.part.child = Other()
    torch.save(made, tmp_path / "made.pt")
    loaded = torch.load(tmp_path / "made.pt", weights_only=False)
    made.recompile()
    made.part.recompile()
    for each in (made, loaded):
        with pytest.raises(UnflattenError, match="'child' returned as its result something else"):
            each(x)


def test_code_is_what_it_was_without_a_change() -> None:
    made: Any = unflatten(torch.export.export(Model("to", is_unread), (torch.randn(2, 3, 4),)))
    before = made.part.code
    made.part.child.register_forward_hook(nothing)
    assert "check_result" not in before
    assert "check_result" in made.part.code
