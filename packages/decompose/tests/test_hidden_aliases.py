"""Writes to what operators return that hide, by their schemas, that it is their argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from program_likeness import assert_as_eager, targets  # type: ignore[import-not-found]
from torch import nn

from lowerdeck.decompose import decompose, explain
from lowerdeck_zoo import Of, exported

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:torch.meshgrid:UserWarning"
)

ATEN = torch.ops.aten

HIDING: dict[str, Callable[[torch.Tensor], Any]] = {
    "unsafe_chunk": lambda x: x.unsafe_chunk(2),
    "unsafe_split": lambda x: torch.unsafe_split(x, 2),
    "unsafe_split_with_sizes": lambda x: torch.unsafe_split_with_sizes(x, [1, 3]),
    "_unsafe_view": lambda x: ATEN._unsafe_view(x, [2, 8]),
    "dropout": lambda x: nn.functional.dropout(x, 0.5, False),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.5, False),
    "alpha_dropout": lambda x: nn.functional.alpha_dropout(x, 0.5, False),
    "type_as": lambda x: x.type_as(x),
    "sum_to_size": lambda x: x.sum_to_size(4, 4),
    "conj_physical": torch.conj_physical,
    "atleast_1d": torch.atleast_1d,
    "atleast_2d": lambda x: torch.atleast_2d(x[0]),  # type: ignore[no-untyped-call]
    "atleast_3d": torch.atleast_3d,
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[0])[0],  # type: ignore[no-untyped-call]
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "diagonal by einsum": lambda x: torch.einsum("ii->i", x),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1][:1], indexing="ij")[0],
    "cartesian_prod": lambda x: torch.cartesian_prod(x[0]),
}


X = torch.arange(1.0, 17.0).view(4, 4)


def written(way: str) -> Of:
    """Write what each operator returns, or its argument, in a region of its own or not."""

    def one(call: Callable[[torch.Tensor], Any], y: torch.Tensor) -> Any:
        with torch.no_grad() if way == "in a region" else nullcontext():
            shown = call(y)
        parts = shown if isinstance(shown, (tuple, list)) else [shown]
        before = [part * 2 for part in parts]
        if way == "the argument":
            y.add_(1)
        elif way != "nothing":
            for index, part in enumerate(parts):
                part.mul_(index + 3)
        return y * 2, before, [part + 1 for part in parts]

    return Of(lambda x: {name: one(call, x * 1) for name, call in HIDING.items()})


@pytest.mark.parametrize("way", ["the result", "the argument", "in a region"])
@pytest.mark.parametrize("table", [{}, None], ids=["all kept", "default"])
def test_a_write_to_a_hidden_alias_is_not_lost(table: Any, way: str) -> None:
    program = exported(written(way), X)
    assert explain(program, table).reason is None
    found, expected = decompose(program, table).module()(X), written(way)(X)
    for name in HIDING:
        torch.testing.assert_close(found[name], expected[name], msg=name)


def test_calls_stay_whole_where_nothing_is_written() -> None:
    program = exported(written("nothing"), X)
    assert Counter(targets(decompose(program, {}))) == Counter(
        targets(program.run_decompositions({}))
    )


@pytest.mark.parametrize("keep", [{ATEN.einsum.default: lambda _: True}, [ATEN.einsum.default]])
def test_what_is_kept_is_taken_apart_only_where_it_is_an_alias(keep: Any) -> None:
    def elsewhere(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        product = torch.einsum("ij,jk->ik", y, x)
        turned = torch.einsum("ij->ji", y)
        y.add_(product)
        return turned * 2

    found = assert_as_eager(Of(elsewhere), X, keep=keep)
    assert targets(found).count(ATEN.einsum.default) == 1


def test_it_holds_where_the_whole_program_goes_torchs_way() -> None:
    def whole(x: torch.Tensor) -> Any:
        y = x * 1
        for part in y.unsafe_chunk(2):
            part.mul_(3)
        torch.einsum("ij->ji", y)[0].add_(1)
        with torch.autocast("cpu", torch.bfloat16):
            chosen = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return y, chosen

    assert explain(exported(Of(whole), X), {}).reason is not None
    assert_as_eager(Of(whole), X, table={})
