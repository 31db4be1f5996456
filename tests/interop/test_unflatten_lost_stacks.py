"""What a module computes in a region that decomposing writes out is never told by its caller.

``run_decompositions`` fails where a signature names what a region computes for another call.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.testing import assert_close

from lowerdeck.decompose import decompose
from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten
from lowerdeck_zoo import saved_and_loaded

X = torch.randn(2, 4)


class Child(nn.Module):
    """A layer beside which something is computed without gradients; how is given."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("kept", torch.ones(4))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def _beside(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        scale = x.sin() + 1
    return self.fc(x) * scale


def _in_the_middle(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    with torch.no_grad():
        scale = y.sin() + x
    return y * scale


def _returned_too(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    with torch.no_grad():
        scale = x.sin()
        other = scale * 2
    return y, scale, y * other


def _with_gradients_in_between(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        scale = x.sin()
        with torch.enable_grad():
            y = self.fc(x)
        scale = scale * 2
    return y * scale


def _written_and_read(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        self.kept.mul_(0.5).add_(x.mean(0))
    return self.fc(x) * self.kept


def _in_half(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scale = x @ x.t()
    return self.fc(x) * scale.sum()


BODIES = {
    body.__name__: body
    for body in (
        _beside,
        _in_the_middle,
        _returned_too,
        _with_gradients_in_between,
        _written_and_read,
        _in_half,
    )
}


class Once(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.first, self.child, self.last = nn.Linear(4, 4), child, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        found = self.child(self.first(x))
        return self.last(found[-1] if isinstance(found, tuple) else found), found


class Deep(Once):
    """Calls it twice, through a module around it, and computes without gradients itself."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__(child)
        self.child = Once(child)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            y = x.cos() * 2
        first, _ = self.child(self.first(x) + y)
        return self.last(first), self.child(first + y)


CASES = [
    *((Once, ("child",), body, strict) for body in BODIES for strict in (False, True)),
    *(
        (Deep, ("child.child", "child"), body, True)
        for body in ("_beside", "_in_the_middle", "_written_and_read")
    ),
]


FORMS: dict[str, Callable[[ExportedProgram], ExportedProgram]] = {
    "raw": saved_and_loaded,
    "run_decompositions": lambda program: saved_and_loaded(program.run_decompositions()),
    "decompose": decompose,
}


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x * 3 + 1)


def _wrap(model: nn.Module, path: str, _: nn.Module) -> None:
    model.set_submodule(path, Around(model.get_submodule(path)))


def _hook(model: nn.Module, path: str, _: nn.Module) -> None:
    model.get_submodule(path).register_forward_pre_hook(lambda _, args: (args[0] * 3 + 1,))


def _swap(model: nn.Module, path: str, eager: nn.Module) -> None:
    model.set_submodule(path, Around(copy.deepcopy(eager.get_submodule(path))))


def _nothing(model: nn.Module, path: str, _: nn.Module) -> None:
    pass


CHANGES = {"wrap": _wrap, "hook": _hook, "swap": _swap, "alone": _nothing}


def _result(model: nn.Module, path: str, change: str) -> Any:
    runs = model.get_submodule(path) if change == "alone" else model
    return [runs(x) for x in (X, X * 2)], dict(model.state_dict())


WRITES = {"_written_and_read"}
"""Bodies of which some calls are refused: nothing tells whether the caller writes that state."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("net", "paths", "body", "strict"), CASES)
def test_a_changed_module_computes_from_what_it_is_given(
    net: type[nn.Module], paths: tuple[str, ...], body: str, strict: bool, form: str
) -> None:
    torch.manual_seed(0)
    eager = net(Child(BODIES[body]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = unflatten(FORMS[form](export_preserving(eager, (X,), strict=strict)))
    assert_close(copy.deepcopy(made)(X), copy.deepcopy(eager)(X))
    told = {row.path: row for row in made.swappable()}
    for path in paths:
        for change, apply in CHANGES.items():
            if change == "alone" and not told[path].callable_alone:
                assert told[path].reason
                continue
            wanted, found = copy.deepcopy(eager), copy.deepcopy(made)
            apply(wanted, path, eager)
            apply(found, path, eager)
            if told[path].reason and change != "alone":
                assert (strict, form, body in WRITES) == (True, "run_decompositions", True)
                with pytest.raises(UnflattenError, match=r"stands for|waits at|reads or writes"):
                    found(X)
                continue
            assert_close(_result(found, path, change), _result(wanted, path, change))


class Maps(Child):
    """Begins a level of vmap, whose end strict export gives to the caller."""

    def __init__(self) -> None:
        super().__init__(_beside)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x) * torch.func.vmap(lambda row: row.sin() + 1)(x)


@pytest.mark.parametrize("form", ["raw", "run_decompositions"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_module_ends_the_level_of_vmap_that_it_begins(strict: bool, form: str) -> None:
    eager = Once(Maps())
    made = unflatten(FORMS[form](export_preserving(eager, (X,), strict=strict)))
    for change, apply in CHANGES.items():
        wanted, found = copy.deepcopy(eager), copy.deepcopy(made)
        apply(wanted, "child", eager)
        apply(found, "child", eager)
        assert_close(_result(found, "child", change), _result(wanted, "child", change))
        torch.rand(1)  # fails within such a level
