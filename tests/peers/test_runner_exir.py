"""The runner on programs that ExecuTorch's own compiler makes, beside eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_rows

from lowerdeck.runner import load

exir = pytest.importorskip("executorch.exir", reason="the full executorch is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")


class Mixed(nn.Module):
    """Normalisation, attention, gather, comparison, split and concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.table(ids))
        y, _ = self.attention(x, x, x, need_weights=False)
        left, right = torch.split(y, [3, 5], dim=-1)
        return torch.cat([right, left], -1), (y > 0).sum(-1)


class Counter(nn.Module):
    """Adds up what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("total").add_(x)
        return self.get_buffer("total") * 2


class Mapped(nn.Module):
    """Maps a function over rows."""

    def forward(self, rows: torch.Tensor, offset: torch.Tensor) -> Any:
        def body(row: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            return torch.sin(row) + shift

        apply: Any = map_rows
        return apply(body, rows, offset)


CASES: dict[str, Callable[[], tuple[nn.Module, list[tuple[torch.Tensor, ...]]]]] = {
    "mixed": lambda: (Mixed(), [(torch.randint(0, 11, (2, 5)),) for _ in range(2)]),
    "state": lambda: (Counter(), [(torch.randn(3),) for _ in range(3)]),
    "map": lambda: (Mapped(), [(torch.randn(4, 3), torch.randn(3)) for _ in range(2)]),
    "lstm": lambda: (nn.LSTM(4, 5, 2), [(torch.randn(3, 1, 4),)]),
    "images": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        ),
        [(torch.randn(1, 3, 9, 9),)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_programs_of_exir_give_what_eager_gives(name: str) -> None:
    torch.manual_seed(0)
    module, calls = CASES[name]()
    module.eval()
    edge = exir.to_edge(torch.export.export(module, calls[0], strict=True))
    content = bytes(edge.to_executorch().buffer)
    for memory in ("strict", "poison"):
        program = load(content, memory=memory)
        eager, _ = CASES[name]()
        eager.load_state_dict(module.state_dict())
        for call in calls:
            with torch.no_grad():
                expected = eager.eval()(*call)
            found = program.run("forward", *call)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_dynamic_shapes_of_exir() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU()).eval()
    rows = torch.export.Dim("rows", min=1, max=7)
    exported = torch.export.export(module, (torch.randn(3, 4),), dynamic_shapes=({0: rows},))
    program = load(bytes(exir.to_edge(exported).to_executorch().buffer), memory="poison")
    for count in (1, 7, 2):
        x = torch.randn(count, 4)
        torch.testing.assert_close(program.run("forward", x), module(x))
