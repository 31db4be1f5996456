"""What nodes know of where they come from, and of what they give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.decompose import decompose
from lowerdeck.torch_base import OpOverload

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

ATEN = torch.ops.aten
FIELDS = ("stack_trace", "nn_module_stack", "torch_fn")


class Inner(nn.Module):
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache[:, 1:3] = x
        self.cache.t()[0].mul_(2)
        return x + 1


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> Any:
        y = self.inner(x) * 2
        y.view(-1)[1:].neg_()
        given[0].add_(1)
        return y.relu(), y


def test_what_a_write_becomes_knows_by_what_it_was_written() -> None:
    program = torch.export.export(Outer(), (torch.ones(4, 2), torch.ones(2, 2)))
    ours, theirs = decompose(program), program.run_decompositions()
    for node in ours.graph.nodes:
        if node.op != "call_function":
            continue
        assert all(node.meta.get(field) for field in FIELDS), node
        assert node.meta.get("from_node"), node
    for target in (ATEN.slice_scatter.default, ATEN.where.self, ATEN.relu.default):
        found, expected = (
            [
                (*(node.meta[field] for field in FIELDS), node.meta["from_node"][0].name)
                for node in each.graph.nodes
                if node.target is target
            ]
            for each in (ours, theirs)
        )
        assert found
        assert sorted(map(str, found)) == sorted(map(str, expected))


class Shown(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.view(2, 2).t(), x.sin()


class Adding(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)


class ReadAfterwards(nn.Module):
    """Reads what one module shows after another has written it."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = Shown()
        self.adding = Adding()
        self.again = Shown()

    def forward(self, x: torch.Tensor) -> Any:
        made = x * 2
        shown, computed = self.shown(made)
        self.adding(made)
        return shown, computed, shown * 2, *self.again(made)


def test_a_view_made_anew_is_no_second_call_of_the_module_that_made_it() -> None:
    x = torch.arange(4.0)
    program = decompose(torch.export.export(ReadAfterwards(), (x,)))
    names = [
        list(node.meta["nn_module_stack"].values())[-1][0]
        for node in program.graph.nodes
        if node.op == "call_function"
    ]
    # Each module in one piece.
    for name in ("shown", "adding", "again"):
        first, last = names.index(name), len(names) - names[::-1].index(name)
        assert set(names[first:last]) == {name}
    found = torch.export.unflatten(program)(x)
    torch.testing.assert_close(tuple(found), ReadAfterwards()(x))


class Kept(nn.Module):
    """Calls that stay as they are: by what is asked, by their sizes, and of higher order."""

    def forward(self, x: torch.Tensor) -> Any:
        def positive(x: torch.Tensor) -> Any:
            return nn.functional.gelu(x), x.sum(0)

        def negative(x: torch.Tensor) -> Any:
            return x.abs(), x.softmax(-1)[0]

        y = nn.functional.silu(nn.functional.linear(x, x))
        both = torch.cond(x.sum() > 0, positive, negative, (y.t(),))
        return *both, x[x > 0], torch.nonzero(x), torch.unique(x, return_counts=True), y


@pytest.mark.parametrize("keep", [(), (ATEN.linear.default, ATEN.silu.default)])
def test_kept_calls_know_what_traced_ones_know(keep: Any) -> None:
    program = torch.export.export(Kept(), (torch.randn(4, 4),))
    table: Any = torch.export.default_decompositions()
    for operator in keep:
        table.pop(operator)
    found, expected = decompose(program, keep=keep), program.run_decompositions(table)
    pairs = zip(found.graph.nodes, expected.graph.nodes, strict=True)
    for node, other in pairs:
        assert node.target == other.target
        # torch gives what is called of higher order the operator that was met before it.
        fields = ("tensor_meta", *(("original_aten",) * isinstance(node.target, OpOverload)))
        for field in fields:
            if node.op == "call_function":
                assert str(node.meta.get(field)) == str(other.meta.get(field)), (node, field)
    (source,) = found.graph.output_node().meta["from_node"]
    assert source.name == expected.graph.output_node().meta["from_node"][0].name == "output"
