"""A program that needs no rewriting is cut without a copy, and with the same result."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export
from torch.fx import Graph, Node
from unflatten_comparison import compare  # type: ignore[import-not-found]

from lowerdeck.unflatten import build, unflatten
from lowerdeck.unflatten.cut.direct import direct_graph
from lowerdeck.unflatten.trace.trace import Trace


class Block(nn.Module):
    """A layer, a constant, a buffer that is only read, and a size."""

    factor: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("shift", torch.randn(4))
        self.factor = torch.full((4,), 0.5)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        y: Tensor = self.fc(x) * self.factor + self.shift
        return torch.cat([y * scale, y.expand(x.shape[0], 4)], 1)[:, :4]


class Model(nn.Module):
    """Tied weights, a layer called twice in two ways, a list, and state read at the top."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.position = nn.Parameter(torch.randn(4))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x, 1.0)
        x = self.blocks[0](x, 2.0)
        return self.head(x), self.position, x


class Counter(nn.Module):
    """Writes its own state."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count


class Quiet(nn.Module):
    """Runs without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x + 1
        return x.relu()


class Wrong(nn.Module):
    """Calls a layer's operator with another module's weight, outside of that module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = Reader()

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x), self.first.weight)


class Reader(nn.Module):
    """Multiplies by what it is given."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight


def _graphs_made(program: ExportedProgram, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return for each unflattening whether it did without a copy of the graph."""
    seen: list[bool] = []

    def watched(trace: Trace) -> Any:
        found = direct_graph(trace)
        seen.append(found is not None)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(build, "direct_graph", watched)
        unflatten(program)
    return seen


TOKENS = torch.tensor([1, 5, 2])
X = torch.randn(2, 2)


@pytest.mark.parametrize(
    ("model", "args", "options", "expected"),
    [
        (Model(), (TOKENS,), {}, True),
        (Model(), (TOKENS,), {"strict": True}, True),
        (Counter(), (X,), {}, False),
        (Quiet(), (X,), {}, False),
        (Wrong(), (X,), {}, False),
        (Model(), (TOKENS,), {"preserve_module_call_signature": ("blocks.1",)}, False),
        (nn.Sequential(nn.ReLU(inplace=True)), (X,), {}, False),
    ],
)
def test_which_programs_need_no_copy(
    model: nn.Module,
    args: tuple[Any, ...],
    options: dict[str, Any],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = export(copy.deepcopy(model), args, **options)
    assert _graphs_made(program, monkeypatch) == [expected]
    compare(copy.deepcopy(model), unflatten(program), args)


@pytest.mark.parametrize("strict", [False, True])
def test_both_ways_give_the_same_code(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    program = export(Model(), (TOKENS,), strict=strict)
    direct = unflatten(program)
    monkeypatch.setattr(build, "direct_graph", lambda *_: None)
    copied = unflatten(program)
    compare(copied, direct, (TOKENS,))
    for (name, one), (other_name, other) in zip(
        direct.named_modules(), copied.named_modules(), strict=True
    ):
        assert name == other_name
        assert sorted(getattr(one, "code", "").splitlines()) == sorted(
            getattr(other, "code", "").splitlines()
        )
        if hasattr(one, "graph"):
            one.graph.lint()


def _facts(graph: Graph) -> list[tuple[Any, ...]]:
    return [
        (node, node.name, node.target, node.args, dict(node.users), dict(node.meta))
        for node in graph.nodes
    ]


def test_the_program_is_neither_changed_nor_kept() -> None:
    program = export(Model(), (TOKENS,))
    before = _facts(program.graph)
    module = unflatten(program)
    after = _facts(program.graph)
    assert [fact[:4] for fact in after] == [fact[:4] for fact in before]
    for one, other in zip(before, after, strict=True):
        assert list(one[4]) == list(other[4])
        assert one[5].keys() == other[5].keys()
    # Meta of ours is ours.
    node = next(node for node in module.graph.nodes if node.op == "placeholder")
    node.meta["mine"] = True
    assert not any("mine" in node.meta for node in program.graph.nodes)
    nodes = [node for inner in module.modules() if hasattr(inner, "graph") for node in _all(inner)]
    assert not {id(node) for node in nodes} & {id(node) for node in program.graph.nodes}
    alive = weakref.ref(program)
    del program
    gc.collect()
    assert alive() is None


def _all(module: Any) -> list[Node]:
    """Return the nodes of a module's graph and everything that they read or are read by."""
    return [other for node in module.graph.nodes for other in (node, *node.args, *node.users)]
