"""Writes to one after the other of what one call gives: linear, and as torch has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from program_likeness import differences  # type: ignore[import-not-found]
from torch import nn
from torch.export import Dim
from torch.fx import Node

from lowerdeck.decompose import decompose, explain
from lowerdeck.torch_base import FakeTensor

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
    "unsafe_chunk": lambda x: x.unsafe_chunk(4),
    "of parts": lambda x: [part for half in x.chunk(2) for part in half.unbind(1)],
}

VARYING = frozenset({"unbind", "unbind by keyword", "chunk", "select"})


class Writing(nn.Module):
    """Writes each part, which it reads before and after, and returns some of them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.kept: torch.Tensor
        self.register_buffer("kept", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        y = x * 1
        parts = WAYS[self.name](y)
        total = self.kept.clone()
        for index, part in enumerate(parts):
            part.mul_(index + 2)
            total = total + part.sum()
        self.kept.copy_(total)
        return y * 2, parts[1], parts[-1]


def exported(name: str, rows: int = 8, **options: Any) -> Any:
    return torch.export.export(Writing(name), (torch.randn(rows, 4),), **options)


def names(program: Any) -> list[str]:
    return [node.name for node in program.graph.nodes]


@pytest.mark.parametrize("name", WAYS)
def test_parts_that_are_written_are_as_torch_has_them(name: str) -> None:
    program = exported(name)
    assert explain(program).reason is None
    found, expected = decompose(program), program.run_decompositions()
    if name != "unsafe_chunk":  # torch loses those writes
        assert not differences(found, expected)
    module, model, x = found.module(), Writing(name), torch.randn(8, 4)
    for _ in range(2):
        torch.testing.assert_close(module(x), model(x))
        torch.testing.assert_close(dict(module.named_buffers()), dict(model.named_buffers()))


@pytest.mark.parametrize("name", [name for name in WAYS if name != "unsafe_chunk"])
@pytest.mark.parametrize("table", [{}, None], ids=["all kept", "default"])
def test_it_holds_for_other_tables_and_sizes_that_vary(name: str, table: Any) -> None:
    dims = ({1: Dim("columns", min=3, max=64)},) if name in VARYING else None
    program = exported(name, dynamic_shapes=dims)
    again = exported(name, dynamic_shapes=dims)
    if not name.startswith("unbind") or dims is None:  # torch makes the size that varies 4
        assert not differences(decompose(program, table), again.run_decompositions(table))
    x = torch.randn(8, 4 if dims is None else 5)
    torch.testing.assert_close(decompose(program, table).module()(x), Writing(name)(x))


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        for part in y.unbind(0):
            part.add_(1)
        return y * 2


def test_what_is_left_out_takes_its_names() -> None:
    program = torch.export.export(Plain(), (torch.randn(5, 3),))
    made, as_torch = decompose(program), program.run_decompositions()
    assert _targets(made) == _targets(as_torch)
    # From 2.14 on torch counts a select that it drops, each time.
    if torch.__version__ < "2.14":
        assert names(made) == names(as_torch)


def _targets(program: torch.export.ExportedProgram) -> list[Any]:
    return [node.target for node in program.graph.nodes]


@pytest.mark.parametrize("name", ["unbind", "split", "chunk", "select", "slice", "tensor_split"])
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

    programs = [exported(name, rows) for rows in (32, 64)]
    count(Node, "__init__")
    count(FakeTensor, "__new__")
    work = []
    for program in programs:
        made.clear()
        decompose(program)
        work.append((made[Node], made[FakeTensor]))
    for few, many in zip(*work, strict=True):
        assert many < 2.2 * few
