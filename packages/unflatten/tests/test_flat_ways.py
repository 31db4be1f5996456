"""Every way of putting eager's block where a plain export gives flat values in another order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_flat_swaps import Around  # type: ignore[import-not-found]
from torch import nn

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten

X = torch.randn(3, 4)


class Two(nn.Module):
    """Reads its second argument first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(b).exp() - a
        return made


class Listed(nn.Sequential):
    """Has a length, which is 0 where its layers are gone."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4))

    def forward(self, a: Any, b: Any) -> Any:  # type: ignore[override]
        return self[0](b).exp() - a


class Counted(Two):
    """Has a length that its layer tells."""

    def __len__(self) -> int:
        return self.layer.in_features


class HandsOn(nn.Module):
    run: Any

    def forward(self, *args: Any) -> Any:
        return self.run(*args)


class Inherits(HandsOn):
    """Takes any values by a forward of its base."""

    def run(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return b.exp() - a


class Outer:
    class Inner(nn.Module):
        """Takes any values, in a class that no module has by name."""

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return args[1].exp() - args[0]


class Model(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.b, self.blocks = kind(), nn.ModuleList([Two(), Two()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.b(x, x.sin())
        for block in self.blocks:
            made = block(made, made.sin())
        return made


KINDS = [Two, Listed, Counted, Inherits, Outer.Inner]


def both(kind: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    """Return a model and what a plain export of it gives."""
    eager = Model(kind).eval()
    return eager, unflatten(torch.export.export(eager, (X,)), **options)


@pytest.mark.parametrize("before", ["nothing", "deleted", "None", "None added", "around"])
@pytest.mark.parametrize("options", [{}, {"restore_types": True}, {"preserve": "all"}])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_whatever_was_there_before(kind: Any, options: dict[str, Any], before: str) -> None:
    eager, module = both(kind, **options)
    if before == "deleted":
        del module.b
    elif before == "None":
        module.b = None
    elif before == "None added":
        module.add_module("b", None)
    elif before == "around":
        module.b = Around(module.b)
        torch.testing.assert_close(module(X), eager(X))
    with pytest.raises(UnflattenError, match="export_preserving"):
        module.b = eager.b


def _with_a_part(eager: Any, module: Any) -> Any:
    made: Any = copy.deepcopy(eager.b)
    made.layer = module.b.layer
    return made


def _traced(eager: Any, _: Any) -> Any:
    trace: Any = torch.jit.trace
    return trace(eager.b, (X, X))


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "with a part of the program": _with_a_part,
    "of a preserved program": lambda eager, _: unflatten(export_preserving(eager, (X,))).b,
    "exported alone": lambda eager, _: unflatten(torch.export.export(eager.b, (X, X))),
    "compiled": lambda eager, _: torch.compile(eager.b, backend="eager"),
    "parallel": lambda eager, _: nn.DataParallel(eager.b),
    "averaged": lambda eager, _: torch.optim.swa_utils.AveragedModel(eager.b),
    "traced": _traced,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", list(WAYS))
def test_whatever_is_around_eagers_block(way: str) -> None:
    eager, module = both(Two)
    with pytest.raises(UnflattenError, match=r"'b'.*export_preserving"):
        module.b = WAYS[way](eager, module)
    torch.testing.assert_close(module(X), eager(X))


def test_a_list_is_looked_at_after_another_one() -> None:
    for between in (
        lambda module: nn.ModuleList([Around(each) for each in module.blocks]),
        lambda _: nn.ModuleList(),
        lambda _: nn.Identity(),
        lambda _: None,
    ):
        eager, module = both(Two)
        module.blocks = between(module)
        with pytest.raises(UnflattenError, match=r"'blocks\.0'"):
            module.blocks = eager.blocks


def test_what_knows_the_order_is_taken() -> None:
    eager, module = both(Two)
    module.blocks[0] = Around(module.blocks[0])
    module.blocks[1] = copy.deepcopy(module.blocks[1])
    torch.testing.assert_close(module(X), eager(X))
    module.blocks[1] = module.blocks[0].inner
    eager.blocks[1] = eager.blocks[0]
    torch.testing.assert_close(module(X), eager(X))


def test_a_flat_block_is_refused_where_eagers_calls_are_known() -> None:
    eager, plain = both(Two)
    module = unflatten(export_preserving(eager, (X,)))
    with pytest.raises(UnflattenError, match=r"'b'.*order of their use.*export_preserving"):
        module.b = plain.b
    module.b = eager.b
    torch.testing.assert_close(module(X), eager(X))


@pytest.mark.parametrize("kind", [Two, Listed, Counted], ids=lambda kind: kind.__name__)
def test_the_table_says_the_same_of_what_stands_for_another(kind: Any) -> None:
    _, module = both(kind, restore_types=True)
    before = {row.path: row for row in module.swappable()}["b"]
    module.b = Around(module.b)
    after = {row.path: row for row in module.swappable()}["b"]
    assert (after.replaceable, after.reason) == (before.replaceable, before.reason)
