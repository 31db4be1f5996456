"""Writes to one after the other of what one call gives: linear, and as torch has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from program_likeness import assert_as_eager, differences  # type: ignore[import-not-found]
from torch.export import Dim
from torch.fx import Node

from lowerdeck.decompose import decompose, explain
from lowerdeck.torch_base import FakeTensor
from lowerdeck_zoo import Of
from lowerdeck_zoo import exported as zoo_exported

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

ATEN = torch.ops.aten
Taken = Callable[[torch.Tensor], Sequence[torch.Tensor]]

WAYS: dict[str, Taken] = {
    "unbind": lambda x: x.unbind(0),
    "unbind by keyword": lambda x: x.unbind(dim=-2),
    "unbind from the end": lambda x: x.unbind(-1),
    "split": lambda x: x.split(2),  # type: ignore[no-untyped-call]
    "split, the last is shorter": lambda x: x.split(3, -2),  # type: ignore[no-untyped-call]
    "split with sizes": lambda x: x.split([1, 3, 0, x.shape[0] - 4]),  # type: ignore[no-untyped-call]
    "chunk": lambda x: x.chunk(x.shape[0], 0),
    "tensor_split": lambda x: x.tensor_split(5),
    "hsplit": lambda x: x.t().hsplit(4),
    "select": lambda x: [x[i] for i in range(x.shape[0])],
    "slice": lambda x: [x[i : i + 1] for i in range(x.shape[0])],
    "of parts": lambda x: [part for half in x.chunk(2) for part in half.unbind(1)],
}

VARYING = frozenset({"unbind", "unbind by keyword", "chunk", "select"})


def writing(name: str) -> Of:
    """Write each part, which is read before and after, and return some of them."""

    def forward(own: Any, x: torch.Tensor) -> Any:
        y = x * 1
        parts = WAYS[name](y)
        total = own.kept.clone()
        for index, part in enumerate(parts):
            part.mul_(index + 2)
            total = total + part.sum()
        own.kept.copy_(total)
        return y * 2, parts[1], parts[-1]

    return Of(forward, kept=torch.zeros(4))


def exported(name: str, rows: int = 8, dims: Any = None) -> Any:
    return zoo_exported(writing(name), torch.randn(rows, 4), dynamic_shapes=dims)


@pytest.mark.parametrize("name", WAYS)
def test_parts_that_are_written_are_as_torch_has_them(name: str) -> None:
    program = exported(name)
    assert explain(program).reason is None
    found, expected = decompose(program), program.run_decompositions()
    assert not differences(found, expected)
    assert_as_eager(writing(name), torch.randn(8, 4))


@pytest.mark.parametrize(
    ("name", "table"),
    [
        *((name, {}) for name in WAYS),
        *((name, None) for name in sorted(VARYING)),
    ],
    ids=str,
)
def test_it_holds_for_other_tables_and_sizes_that_vary(name: str, table: Any) -> None:
    dims = (({1: Dim("columns", min=3, max=64)},),) if name in VARYING else None
    program, again = (exported(name, dims=dims) for _ in range(2))
    if not name.startswith("unbind") or dims is None:  # torch makes the size that varies 4
        assert not differences(decompose(program, table), again.run_decompositions(table))
    x = torch.randn(8, 4 if dims is None else 5)
    torch.testing.assert_close(decompose(program, table).module()(x), writing(name)(x))


@pytest.mark.parametrize("name", ["select", "slice"])
def test_twice_as_many_parts_are_twice_the_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Counter[type] = Counter()

    def count(kind: Any, name: str) -> None:
        plain = getattr(kind, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            made[kind] += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(kind, name, counted)

    programs = [exported(name, rows) for rows in (16, 32)]
    count(Node, "__init__")
    count(FakeTensor, "__new__")
    work = []
    for program in programs:
        made.clear()
        decompose(program)
        work.append((made[Node], made[FakeTensor]))
    for few, many in zip(*work, strict=True):
        assert many < 2.2 * few
