"""Modules can be swapped where arguments or results were written in place."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from unflatten_comparison import FORMS, compare, programs  # type: ignore[import-not-found]

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module


class Layer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x)


class WritesPart(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()

    def forward(self, x: Tensor) -> Any:
        y = x + 1
        y[:, :2].mul_(2)
        return self.inner(y)


class WritesResults(WritesPart):
    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        y[:, :1].add_(1)
        y = self.inner(y)
        # Becomes a choice between all elements.
        y.view(-1)[0] = 0.25
        return self.inner(y) + y


class WritesAll(WritesPart):
    def forward(self, x: Tensor) -> Any:
        y = x + 1
        y.view(-1).mul_(2)
        return self.inner(y)


class WritesInput(WritesPart):
    def forward(self, x: Tensor) -> Any:
        x[:, :1].add_(1)
        return self.inner(x)


class WritesState(WritesPart):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(2, 4))

    def forward(self, x: Tensor) -> Any:
        self.state[:, :1].add_(x[:, :1])
        y = self.inner(self.state)
        self.state[:, :1].add_(x[:, :1])
        return self.inner(self.state) + y


class Difference(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.fc(x) - y


class WritesOneIntoAnother(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Difference()

    def forward(self, x: Tensor) -> Any:
        a, b = x + 1, x + 2
        b[:, :1].mul_(3)
        a[:, :1] = b[:, :1]
        return self.inner(a, b)


class WritesItsResult(Layer):
    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        y[:, :2].mul_(2)
        return y


class CallsIt(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = WritesItsResult()

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.inner(x).sin())


MODELS = (
    WritesPart,
    WritesResults,
    WritesAll,
    WritesInput,
    WritesState,
    WritesOneIntoAnother,
    CallsIt,
)
X = torch.randn(2, 4)


def _program(eager: nn.Module, form: str) -> Any:
    options = {"preserve_module_call_signature": ("inner",)}
    return programs(eager, (X.clone(),), forms=(form,), **options)[form]


def _check(model: type[nn.Module], form: str) -> None:
    eager = model()
    program = _program(eager, form)
    compare(copy.deepcopy(eager), unflatten(program), (X,))
    swapped = unflatten(program)
    swapped.set_submodule("inner", copy.deepcopy(eager).get_submodule("inner"))
    compare(copy.deepcopy(eager), swapped, (X,))


@pytest.mark.parametrize("model", MODELS, ids=lambda cls: cls.__name__)
def test_a_swapped_module_gets_the_value_after_the_write(model: type[nn.Module]) -> None:
    _check(model, "non-strict decomposed")


@pytest.mark.heavy
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS, ids=lambda cls: cls.__name__)
def test_a_swapped_module_gets_it_in_every_form(model: type[nn.Module], form: str) -> None:
    _check(model, form)


def test_a_module_called_alone_returns_what_it_wrote() -> None:
    eager: Any = CallsIt()
    module: Any = unflatten(_program(eager, "non-strict decomposed"))
    torch.testing.assert_close(module.inner(X), eager.inner(X))


class WritesBase(WritesPart):
    """The view that was made before the write is no longer what the call is given."""

    def forward(self, x: Tensor) -> Any:
        y = x + 1
        view = y[:2]
        before = view + 0
        y.mul_(2)
        return self.inner(view) + before


@pytest.mark.parametrize("form", ["non-strict decomposed", "strict decomposed"])
def test_an_argument_that_decomposing_lost_is_said(form: str) -> None:
    eager = WritesBase()
    with pytest.warns(UserWarning, match="An argument of inner seems .* do not replace") as caught:
        module = unflatten(_program(eager, form))
    assert len(caught) == 1
    compare(eager, module, (X,))


def test_an_unused_argument_beside_a_written_one_is_no_matter() -> None:
    class Unused(Difference):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self.fc(x)

    eager: Any = WritesOneIntoAnother()
    eager.inner = Unused()
    program = _program(eager, "non-strict decomposed")
    swapped: Any = unflatten(program)
    swapped.inner = eager.inner
    compare(eager, swapped, (X,))


class ReturnsWhatItWroteTwice(Model):
    """Decomposing takes the whole for the part that is returned, which is written twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    class Inner(Model):
        def forward(self, x: Tensor) -> Any:
            row = x[0]
            row.add_(1)
            x.t().mul_(2)
            return x * 2, row

    def forward(self, x: Tensor) -> Any:
        whole, row = self.inner(x + 0)
        return whole + row


@pytest.mark.parametrize("form", ["non-strict decomposed", "strict decomposed"])
def test_a_result_that_decomposing_took_for_another_is_not_guessed(form: str) -> None:
    eager: Any = ReturnsWhatItWroteTwice()
    program = _program(eager, form)
    compare(eager, unflatten(program), (X,))
    swapped = unflatten(program)
    swapped.set_submodule("inner", eager.inner)
    with pytest.raises(UnflattenError, match="shares memory with something that is written"):
        swapped(X)


class _AddsInPlace(nn.Module):
    """Changes its argument in place, or a new tensor of the same size."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what was changed."""
        x = x * 1 if self.own else x
        x.add_(1)
        return x


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("decomposed", [False, True])
def test_table_tells_where_an_argument_would_not_be_changed(own: bool, decomposed: bool) -> None:
    """A module that the table says can be called alone changes its argument as eager's does."""
    eager = nn.Sequential(nn.Linear(2, 2), _AddsInPlace(own))
    program = export_preserving(eager, (torch.ones(1, 2),))
    module = unflatten(program.run_decompositions() if decomposed else program)
    row = next(row for row in module.swappable() if row.path == "1")
    assert row.replaceable
    assert row.callable_alone == (own or not decomposed)
    assert ("in place" in row.reason) != row.callable_alone
    if row.callable_alone:
        mine, theirs = torch.ones(1, 2), torch.ones(1, 2)
        torch.testing.assert_close(module.get_submodule("1")(mine), eager[1](theirs))
        torch.testing.assert_close(mine, theirs)
