"""Writes to what operators return that hide, by their schemas, that it is their argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.decompose import decompose, explain

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


class Writing(nn.Module):
    """Writes what is returned, or what it is returned from, in a region of its own or not."""

    def __init__(self, name: str, way: str) -> None:
        super().__init__()
        self.name = name
        self.way = way

    def forward(self, x: torch.Tensor) -> Any:
        y = x * 1
        if self.way == "in a region":
            with torch.no_grad():
                shown = HIDING[self.name](y)
        else:
            shown = HIDING[self.name](y)
        parts = shown if isinstance(shown, (tuple, list)) else [shown]
        before = [part * 2 for part in parts]
        if self.way == "the argument":
            y.add_(1)
        elif self.way != "nothing":
            for index, part in enumerate(parts):
                part.mul_(index + 3)
        return y * 2, before, [part + 1 for part in parts]


def exported(name: str, way: str) -> Any:
    return torch.export.export(Writing(name, way), (torch.arange(1.0, 17.0).view(4, 4),))


def called(program: Any) -> Counter[Any]:
    return Counter(node.target for node in program.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("way", ["the result", "the argument", "in a region"])
@pytest.mark.parametrize("table", [{}, None], ids=["all kept", "default"])
@pytest.mark.parametrize("name", HIDING)
def test_what_is_written_to_a_hidden_alias_is_not_lost(name: str, table: Any, way: str) -> None:
    program = exported(name, way)
    assert explain(program, table).reason is None
    x = torch.arange(1.0, 17.0).view(4, 4)
    torch.testing.assert_close(decompose(program, table).module()(x), Writing(name, way)(x))


@pytest.mark.parametrize("name", HIDING)
def test_calls_stay_whole_where_nothing_is_written(name: str) -> None:
    program = exported(name, "nothing")
    assert called(decompose(program, {})) == called(program.run_decompositions({}))


class Elsewhere(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        product = torch.einsum("ij,jk->ik", y, x)
        turned = torch.einsum("ij->ji", y)
        y.add_(product)
        return turned * 2


@pytest.mark.parametrize("keep", [{ATEN.einsum.default: lambda _: True}, [ATEN.einsum.default]])
def test_what_is_kept_is_taken_apart_only_where_it_is_an_alias(keep: Any) -> None:
    x = torch.randn(4, 4)
    program = torch.export.export(Elsewhere(), (x,))
    found = decompose(program, keep=keep)
    assert called(found)[ATEN.einsum.default] == 1
    torch.testing.assert_close(found.module()(x), Elsewhere()(x))


def test_it_holds_where_the_whole_program_goes_torchs_way() -> None:
    class Whole(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y = x * 1
            for part in y.unsafe_chunk(2):
                part.mul_(3)
            torch.einsum("ij->ji", y)[0].add_(1)
            with torch.autocast("cpu", torch.bfloat16):
                chosen = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
            return y, chosen

    x = torch.eye(4)
    program = torch.export.export(Whole(), (x,))
    assert explain(program, {}).reason is not None
    torch.testing.assert_close(decompose(program, {}).module()(x), Whole()(x))
