"""Modules of which a plain export has no call: nothing in their place would be called."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten

X = torch.randn(2, 4)


def model() -> nn.Sequential:
    inner = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    return nn.Sequential(nn.Linear(4, 4), nn.Identity(), inner, nn.ReLU())


def plain() -> Any:
    return unflatten(torch.export.export(model(), (X,)))


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) * 2


def put_there(module: Any, path: str, new: nn.Module, how: str) -> None:
    outer, _, name = path.rpartition(".")
    if how == "deleted":
        delattr(module.get_submodule(outer), name)
    elif how == "after an Identity":
        module.set_submodule(path, nn.Identity())
    module.set_submodule(path, new)


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("copied", [lambda it: it, copy.deepcopy, pickled])
@pytest.mark.parametrize("path", ["1", "2.0"])
@pytest.mark.parametrize("put", ["set", "deleted", "after an Identity"])
def test_another_one_is_refused(put: str, path: str, copied: Any) -> None:
    for new in (nn.Tanh(), "wrapped", nn.Sequential()):
        module = copied(plain())
        expected = module(X)
        old = module.get_submodule(path)
        other = Around(old) if isinstance(new, str) else new
        with pytest.raises(UnflattenError, match=r"computes nothing.*export_preserving"):
            put_there(module, path, other, put)
        if put == "set":
            row = next(row for row in module.swappable() if row.path == path)
            assert not row.replaceable
            assert "computes nothing" in row.reason
        module.set_submodule(path, old)
        torch.testing.assert_close(module(X), expected)


class Returns(nn.Module):
    """Returns what it is given, and holds another module."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("preserve", [None, "all"])
@pytest.mark.parametrize("put", ["set", "deleted", "after an Identity"])
@pytest.mark.parametrize("path", ["1", "1.0", "2", "2.unused"])
def test_so_it_is_with_what_holds_such_modules_alone(
    path: str, put: str, preserve: Any, strict: bool
) -> None:
    eager = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Identity()), Returns())
    module: Any = unflatten(torch.export.export(eager, (X,), strict=strict), preserve=preserve)
    row = next(row for row in module.swappable() if row.path == path)
    assert not row.replaceable
    assert "computes nothing" in row.reason
    torch.testing.assert_close(module(X), eager(X))
    for new in (nn.Tanh(), Around(module.get_submodule(path))):
        changed = copy.deepcopy(module)
        with pytest.raises(UnflattenError, match=r"computes nothing.*export_preserving"):
            put_there(changed, path, new, put)


def test_what_holds_a_module_with_an_effect_may_be_replaced() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Identity(), nn.Tanh()])
            self.read = nn.ModuleDict({"by": nn.ModuleList([nn.Linear(4, 4)])})
            self.kept = nn.Module()
            self.kept.register_buffer("last", torch.zeros(2, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            self.kept.last.copy_(x)  # type: ignore[operator]
            by: Any = self.read["by"]
            found: torch.Tensor = x @ by[0].weight
            return found

    eager, other = Holds(), Holds()
    other.layers[1] = nn.ReLU()
    program = torch.export.export(eager, (X,))
    for exported in (program, program.run_decompositions({})):
        module: Any = unflatten(exported)
        rows = {row.path: row for row in module.swappable()}
        held = ("layers.1", "read", "read.by", "read.by.0", "kept")
        can = {path: rows[path].replaceable or "flat values" in rows[path].reason for path in held}
        assert all(can.values()), can
        module.layers, module.read, module.kept = other.layers, other.read, other.kept
        torch.testing.assert_close(module(X), other(X))
        torch.testing.assert_close(module.kept.last, other.kept.last)


def test_an_identity_may_be_there_and_the_table_says_what_it_is() -> None:
    module = plain()
    expected = module(X)
    module.set_submodule("1", nn.Identity())
    torch.testing.assert_close(module(X), expected)
    row = next(row for row in module.swappable() if row.path == "1")
    assert not row.replaceable
    assert row.callable_alone
    waiting = nn.Identity()
    waiting.register_forward_hook(lambda *_: None)
    with pytest.raises(UnflattenError, match="computes nothing"):
        module.set_submodule("1", waiting)


def test_what_others_read_may_be_replaced() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = x @ self.table.weight
            return found

    eager = Reads()
    module: Any = unflatten(torch.export.export(eager, (X,)))
    module.table = eager.table = nn.Linear(4, 4)
    torch.testing.assert_close(module(X), eager(X))


def test_a_preserved_program_says_after_a_swap_what_it_said_before() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.nothing = nn.Linear(4, 4), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            z: torch.Tensor = self.nothing(y)
            y.add_(1)
            return z

    eager = Written()
    module: Any = unflatten(export_preserving(eager, (X,)))
    before = next(row for row in module.swappable() if row.path == "nothing")
    assert not before.replaceable
    module.nothing = nn.Tanh()
    after = next(row for row in module.swappable() if row.path == "nothing")
    assert (after.replaceable, after.reason) == (False, before.reason)
    with pytest.raises(UnflattenError):
        module(X)


class InRegion(nn.Module):
    """Calls an Identity beside a write, without gradients, by one of its names, or by two."""

    total: torch.Tensor

    def __init__(self, calls: str) -> None:
        super().__init__()
        self.calls, self.one, self.linear = calls, nn.Identity(), nn.Linear(4, 4)
        self.other = self.one if calls == "by two names" else nn.Identity()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = self.other(x)
            self.total.add_(y.sum(0))
        if self.calls == "outside too":
            y = y + self.other(x * 3)
        return self.linear(x) + y * 2 + self.one(x * 3)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("calls", ["alone", "outside too", "by two names"])
def test_a_call_that_a_region_has_marks_of_alone_is_never_silently_missing(
    calls: str, strict: bool
) -> None:
    """Its alias is lost where something is written, and the marks are of no other call."""
    eager = InRegion(calls).eval()
    made: Any = unflatten(export_preserving(eager, (X,), strict=strict))
    torch.testing.assert_close(made(X), eager(X))
    for model in (eager, made):
        model.other.register_forward_hook(lambda _module, _args, result: result * 1.5)
    with pytest.raises(UnflattenError, match="A hook waits at 'other', which returns"):
        made(X)
