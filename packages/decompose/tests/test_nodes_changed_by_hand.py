"""A node that was changed by hand may be wrong in any way: one clear error, or a program."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.fx import Graph, Node

from lowerdeck.decompose import DecomposeError, decompose, explain
from lowerdeck.torch_base import graphs_of

ATEN = torch.ops.aten


class Many(nn.Module):
    """Writes, views, sizes known and unknown, control flow and regions."""

    held: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("held", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        self.held.add_(x[0])
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x).float()
        first, second = y.chunk(2, 1)
        either = torch.cond(x.shape[0] > 3, torch.sin, torch.cos, (first,))
        return (
            either.reshape(-1),
            second.clone().as_strided((2,), (1,)),
            x.nonzero(),
            x.shape[0] * 2,
        )


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    model = Many().requires_grad_(requires_grad=False)
    return export(model, (torch.rand(5, 4),), dynamic_shapes=({0: Dim.AUTO},))


def _set(**changed: Any) -> Callable[[Node], None]:
    def change(node: Node) -> None:
        for name, value in changed.items():
            setattr(node, name, value)

    return change


def _meta(**changed: Any) -> Callable[[Node], None]:
    return lambda node: node.meta.update(changed)


def _last(value: Any) -> Callable[[Node], None]:
    return lambda node: setattr(node, "args", (*node.args[:-1], value))


def _first(value: Callable[[Node], Any]) -> Callable[[Node], None]:
    return lambda node: setattr(node, "args", (value(node), *node.args[1:]))


def _input(node: Node) -> Node:
    return node.graph.find_nodes(op="placeholder")[0]  # type: ignore[no-any-return]


CHANGES: dict[str, Callable[[Node], None]] = {
    "no meta": lambda node: node.meta.clear(),
    "val of another kind": _meta(val=3),
    "names of sizes": _meta(unbacked_bindings={}),
    "no arguments": _set(args=()),
    "one argument less": lambda node: setattr(node, "args", node.args[:-1]),
    "another keyword": _set(kwargs={"other": 1}),
    "a number first": _first(lambda node: 3),
    "a tensor first": _first(lambda node: torch.ones(2)),
    "itself first": _first(lambda node: node),
    "a number last": _last(7),
    "a word last": _last("x"),
    "target: any function": _set(target=len),
    "target: getitem": _set(target=operator.getitem),
    "target: another operator": _set(target=ATEN.exp.default),
    "target: a write": _set(target=ATEN.add_.Tensor),
    "an attribute": _set(op="get_attr"),
}


def _calls(program: ExportedProgram) -> list[Node]:
    graphs: list[Graph] = [module.graph for module in graphs_of(program.graph_module)]
    return [node for graph in graphs for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", CHANGES)
def test_each_node_may_be_wrong(
    program: ExportedProgram, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise ValueError("torch would trace the whole program")

    # What torch does with such programs is its own: here, what is told of them.
    monkeypatch.setattr(ExportedProgram, "run_decompositions", refuse)
    for position in range(len(_calls(program))):
        broken = copy.deepcopy(program)
        node = _calls(broken)[position]
        try:
            CHANGES[name](node)
        except (RuntimeError, IndexError):
            # torch itself does not let it be so.
            continue
        before = [str(module.graph) for module in graphs_of(broken.graph_module)]
        try:
            decompose(broken)
        except DecomposeError as error:
            assert str(error)  # noqa: PT017
        assert [str(module.graph) for module in graphs_of(broken.graph_module)] == before


def test_what_fails_at_a_node_names_it(program: ExportedProgram) -> None:
    broken = copy.deepcopy(program)
    last = [node for node in _calls(broken) if node.target is operator.getitem][-1]
    last.args = (last.args[0], 7)
    with pytest.raises(DecomposeError, match=f"{last.name}.*IndexError"):
        decompose(broken)
    assert explain(broken).failed
