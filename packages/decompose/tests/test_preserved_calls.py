"""Programs that record how modules are called: what their signatures name stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.decompose import Rules, decompose, decompose_graph


class Returning(nn.Module):
    """Returns what its caller reads, and something that nobody does."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.norm = nn.LayerNorm(4)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
        idle: dict[str, Callable[[], Any]] = {
            "one call": lambda: nn.functional.gelu(x),
            "taken apart": lambda: self.norm(nn.functional.hardswish(x)),
            "one of several": lambda: torch.split(x * 3, 2, -1)[1],
            "a view of what is written": lambda: self.calls.view(2, 2),
            "an input": lambda: scale,
            "the same twice": lambda: (x.exp(),) * 2,
        }
        made = idle[self.name]()
        self.calls.add_(1)
        return x * 2 + self.calls, made


class Calling(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.child = Returning(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used: torch.Tensor = self.child(x, x.cos())[0]
        return used + 1


NAMES = (
    *("one call", "taken apart", "one of several", "a view of what is written", "an input"),
    "the same twice",
)


@pytest.mark.filterwarnings(
    "ignore:Attempted to insert a get_attr Node:UserWarning"
)  # torch's own
@pytest.mark.parametrize("name", NAMES)
def test_what_a_signature_names_stays_though_nobody_reads_it(name: str) -> None:
    x = torch.randn(2, 4)
    program = torch.export.export(Calling(name), (x,), preserve_module_call_signature=("child",))
    made = decompose(program)
    known = {node.name for node in made.graph.nodes}
    (entry,) = (one for one in made.module_call_graph if one.fqn == "child")
    assert entry.signature is not None
    assert {one.name for one in entry.signature.outputs} <= known
    found, model = made.module(), Calling(name)
    for _ in range(2):
        torch.testing.assert_close(found(x), model(x))
    again = torch.export.export(Calling(name), (x,), preserve_module_call_signature=("child",))
    back = torch.export.unflatten(decompose(again))
    torch.testing.assert_close(back(x), Calling(name)(x))
    # Whoever compiles the graph gets nothing that nobody reads.
    parts = decompose_graph(program, Rules.of(None))
    idle = [node for node in parts.graph_module.graph.nodes if not node.users]
    assert {node.op for node in idle} <= {"output", "placeholder"}
