"""A preserved call takes and returns what eager's does, whatever decomposing made of it."""

from __future__ import annotations

import copy
import pickle
import warnings
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


class Norms(Model):
    """Statistics of one layout are handed from call to call; one result is another's argument."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(4)
        self.layer = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Any:
        y, z = self.layer(self.batch(x)).float().chunk(2, 1)
        return self.batch(torch.cat([z, y], 1).contiguous())


class Results(Model):
    """Results that decomposing leaves without a node of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        a, b, c = self.inner(self.fc(x))
        d, e, f = self.inner(a.clone() + b.float())
        return d + e + f + c


class Inner(Model):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.dropout(x), x.float(), self.fc(self.dropout(x)).contiguous()


_CASES = [(Norms, ("batch", "layer")), (Results, ("inner",)), (Results, ("inner.fc", "fc"))]


@pytest.mark.parametrize(("model", "preserved"), _CASES)
def test_preserved_modules_can_be_swapped(
    model: type[nn.Module], preserved: tuple[str, ...]
) -> None:
    _check_swaps(model().train(), preserved, "non-strict decomposed")


@pytest.mark.heavy
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("model", "preserved"), _CASES)
def test_preserved_modules_can_be_swapped_in_every_form(
    model: type[nn.Module], preserved: tuple[str, ...], form: str, train: bool
) -> None:
    _check_swaps(model().train(train), preserved, form)


def _check_swaps(eager: nn.Module, preserved: tuple[str, ...], form: str) -> None:
    x = torch.randn(3, 4)
    options = {"preserve_module_call_signature": preserved}
    program = programs(eager, (x,), forms=(form,), **options)[form]
    compare(copy.deepcopy(eager), unflatten(program), (x,), calls=2)
    swapped = unflatten(program)
    for name in preserved:
        swapped.set_submodule(name, copy.deepcopy(eager).get_submodule(name))
    compare(copy.deepcopy(eager), swapped, (x,), calls=2)


@pytest.mark.parametrize("form", ["non-strict", "strict decomposed"])
def test_a_preserved_norm_called_alone_returns_its_result(form: str) -> None:
    eager: Any = Norms()
    x = torch.randn(3, 4)
    options = {"preserve_module_call_signature": ("batch",)}
    program = programs(eager, (x,), forms=(form,), **options)[form]
    module: Any = unflatten(program)
    torch.testing.assert_close(module.batch(x), eager.batch(x))
    torch.testing.assert_close(module.batch.running_var, eager.batch.running_var)


@pytest.mark.parametrize("form", ["non-strict", "strict decomposed"])
def test_preserved_children_with_numbers_for_names_keep_their_order(form: str) -> None:
    eager, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 4)
    options = {"preserve_module_call_signature": ("0", "1", "2")}
    program = programs(eager, (x,), forms=(form,), **options)[form]
    module = unflatten(program)
    assert [name for name, _ in module.named_modules()] == ["", "0", "1", "2"]
    compare(eager, module, (x,))


class Recurrent(Model):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3)

    def forward(self, x: Tensor) -> Any:
        y, (h, c) = self.lstm(x)
        return y, h + c, h


@pytest.mark.parametrize("strict", [False, True])
def test_a_preserved_operator_of_several_results(strict: bool) -> None:
    eager, x = Recurrent(), torch.randn(2, 3, 4)
    options = {"preserve_module_call_signature": ("lstm",)}
    form = "strict" if strict else "non-strict"
    forms = (form, f"{form} decomposed")
    plain, decomposed = programs(eager, (x,), forms=forms, **options).values()
    module: Any = unflatten(plain)
    torch.testing.assert_close(module.lstm(x), eager.lstm(x))
    module.lstm = eager.lstm
    compare(eager, module, (x,))
    # export of torch 2.13 names values at random for results that decomposing took apart.
    with pytest.warns(UserWarning, match="lost the arguments or results of lstm"):
        module = unflatten(decomposed)
    compare(eager, module, (x,))
    compare(eager, pickle.loads(pickle.dumps(module)), (x,))
    module.lstm = eager.lstm
    with pytest.raises(UnflattenError, match=r"LSTM stands for 'lstm'.* before run_decomposi"):
        module(x)


class Unread(nn.Module):
    """Returns what its caller drops, beside what it reads."""

    def __init__(self, itself: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.itself = itself

    def forward(self, x: Tensor) -> Any:
        return x if self.itself else x.tanh(), self.lin(x)


class Drops(nn.Module):
    def __init__(self, itself: bool) -> None:
        super().__init__()
        self.inner = Unread(itself)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x + 1)[0] * 2


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("how", ["ours", "torch"])
def test_a_result_that_decomposing_dropped_is_no_parameter(how: str, itself: bool) -> None:
    """Export names a parameter then that went into it."""
    eager, x = Drops(itself), torch.randn(2, 8)
    if how == "ours":
        program = export_preserving(eager, (x,))
    else:
        program = torch.export.export(eager, (x,), preserve_module_call_signature=("inner",))
    with pytest.warns(UserWarning, match=r"lost the arguments or results of inner"):
        module: Any = unflatten(program.run_decompositions())
    torch.testing.assert_close(module(x), eager(x))
    assert not module.swappable()[0].replaceable

    def swapped() -> Any:
        module.inner = eager.inner
        return module(x)

    with pytest.raises(UnflattenError, match=r"before run_decompositions|is called nowhere"):
        swapped()
    module = unflatten(program)
    torch.testing.assert_close(module.inner(x), eager.inner(x))


def _partly_lost() -> Any:
    class Both(Recurrent):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return super().forward(self.fc(x))

    options = {"preserve_module_call_signature": ("lstm", "fc")}
    form = "non-strict decomposed"
    return programs(Both(), (torch.randn(2, 3, 4),), forms=(form,), **options)[form]


def test_what_decomposing_lost_is_said_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unflatten(_partly_lost())
    assert [str(one.message).partition(",")[0] for one in caught] == [
        "Decomposing this program lost the arguments or results of lstm"
    ]


@pytest.mark.filterwarnings("ignore:Decomposing this program lost:UserWarning")
def test_a_program_that_lost_a_signature_compiles_and_keeps_the_others() -> None:
    module: Any = unflatten(_partly_lost())
    x = torch.randn(2, 3, 4)
    expected = module(x)
    fc = nn.Linear(4, 4)
    fc.load_state_dict(module.fc.state_dict())
    module.fc = fc
    torch.testing.assert_close(module(x), expected)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled: Any = torch.compile(module, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), expected)
        again = torch.export.export(module, (x,), strict=True).module()
    torch.testing.assert_close(again(x), expected)
