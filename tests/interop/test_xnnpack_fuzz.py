"""Random graphs, attentions and layers through XNNPACK in the official runtime."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from lowerdeck.runner import load
from lowerdeck_zoo import Of
from lowerdeck_zoo.seeds import seeds
from tests.interop.runs import check, file_of, run

Tensor = torch.Tensor
CHANNELS = 4


class RandomModel(nn.Module):
    """A random graph on images of four channels, with the values that are not images left out.

    Args:
        seed: Chooses the graph and its weights.
        size: Number of operations.
        gaps: Whether to mix in an operator that XNNPACK lacks, so that there are partitions.
    """

    def __init__(self, seed: int, size: int, *, gaps: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.rng = random.Random(seed)
        self.layers = nn.ModuleList()
        self.plan: list[tuple[Callable[..., Tensor], list[int]]] = []
        names = [*UNARY, *BINARY, *(["gap"] if gaps else [])]
        for place in range(size):
            name = self.rng.choice(names)
            sources = [self.rng.randint(max(0, place - 4), place) for _ in range(2)]
            if name in BINARY:
                self.plan.append((BINARY[name], sources))
            elif name == "gap":
                self.plan.append((lambda x: torch.flip(x, [2]), sources[:1]))
            else:
                self.plan.append((UNARY[name](self), sources[:1]))
        self.outputs = sorted({size, *(self.rng.randint(1, size) for _ in range(2))})

    def layer(self, module: nn.Module) -> nn.Module:
        """Keep a layer with weights; batch norms get statistics of their own."""
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 2)
        self.layers.append(module)
        return module

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for function, sources in self.plan:
            values.append(function(*(values[one] for one in sources)))
        return tuple(values[one] for one in self.outputs)


def layered(
    make: Callable[[RandomModel], nn.Module],
) -> Callable[[RandomModel], Callable[..., Tensor]]:
    return lambda model: model.layer(make(model))


def plain(function: Callable[..., Tensor]) -> Callable[[RandomModel], Callable[..., Tensor]]:
    return lambda model: function


def gate(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x.mean((2, 3), keepdim=True))


def attend(x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(tokens, tokens, tokens).transpose(1, 2).reshape(x.shape)


def shuffle(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=1)
    return torch.cat([second, first], dim=1)


def shift(x: Tensor) -> Tensor:
    return F.pad(x, (1, 0, 0, 1))[:, :, 1:, :-1]


C = CHANNELS
UNARY: dict[str, Callable[[RandomModel], Callable[..., Tensor]]] = {
    "conv": layered(lambda m: nn.Conv2d(C, C, 3, padding=1, bias=m.rng.random() < 0.5)),
    "point": layered(lambda m: nn.Conv2d(C, C, 1, groups=m.rng.choice([1, 2]))),
    "depthwise": layered(lambda m: nn.Conv2d(C, C, 3, padding=1, groups=C)),
    "transposed": layered(lambda m: nn.ConvTranspose2d(C, C, 3, padding=1)),
    "norm": layered(lambda m: nn.BatchNorm2d(C)),
    "layer_norm": layered(lambda m: nn.LayerNorm(5)),
    "group_norm": layered(lambda m: nn.GroupNorm(2, C)),
    "norm_of_images": layered(lambda m: nn.GroupNorm(1, C)),
    "linear": layered(lambda m: nn.Linear(5, 5)),
    "relu": plain(torch.relu),
    "relu6": plain(F.relu6),
    "tanh": plain(torch.tanh),
    "gelu": plain(F.gelu),
    "silu": plain(F.silu),
    "square": plain(lambda x: torch.tanh(x) ** 2),
    "max_pool": plain(lambda x: F.max_pool2d(x, 3, 1, 1)),
    "avg_pool": plain(lambda x: F.avg_pool2d(x, 3, 1, 1)),
    "resize": plain(lambda x: F.interpolate(x, size=x.shape[2:], mode="bilinear")),
    "softmax_channels": plain(lambda x: torch.softmax(x, 1)),
    "softmax": plain(lambda x: torch.softmax(x, -1)),
    "numbers": plain(lambda x: 1 - x / 2),
    "sum": plain(lambda x: torch.tanh(x.sum(1, keepdim=True)) + x),
    "last_mean": plain(lambda x: x - x.mean(-1, keepdim=True)),
    "gate": plain(gate),
    "attend": plain(attend),
    "shuffle": plain(shuffle),
    "halves": plain(halves),
    "shift": plain(shift),
    "permute": plain(lambda x: x.permute(0, 2, 3, 1).relu().permute(0, 3, 1, 2)),
    "select": plain(lambda x: x[:, 1].unsqueeze(1) * x),
    "row": plain(lambda x: x + x[0, 0, 0]),
}
BINARY: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": lambda x, y: torch.tanh(x) * y,
    "div": lambda x, y: x / (y * y + 1),
    "maximum": torch.maximum,
    "add_relu": lambda x, y: torch.relu(x + y),
    "cat": lambda x, y: torch.cat([x, y], dim=1)[:, 1:5],
    "product": lambda x, y: torch.tanh(x @ y.transpose(-1, -2) @ y),
    "scaled": lambda x, y: torch.add(x, y, alpha=0.5),
}


def check_graph(seed: int) -> None:
    model = RandomModel(seed, 4 + seed % 13, gaps=seed % 3 == 0).eval()
    x = torch.randn(2, CHANNELS, 6, 5)
    file = file_of(model, (x,), decomposed=seed % 5 == 0)
    with torch.no_grad():
        expected = model(x)
    for outputs in (run(file, [(x,)])[0], load(file).run("forward", x)):
        for found, right in zip(outputs, expected, strict=True):
            torch.testing.assert_close(found, right, rtol=2e-4, atol=2e-4, msg=f"seed {seed}")


@pytest.mark.parametrize("seed", seeds(400))
def test_a_random_graph_equals_eager(seed: int) -> None:
    check_graph(seed)


SIZE = st.integers(1, 5)
FEW = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FEW
@given(st.data())
def test_attention_of_any_sizes(tmp_path: Path, data: st.DataObject) -> None:
    batch, groups, many, rows, columns, width, out = (data.draw(SIZE) for _ in range(7))
    masked = data.draw(st.sampled_from(["", "causal", "bools", "numbers"]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    mask: Tensor | None = None
    if masked == "bools":
        mask = torch.rand(data.draw(st.sampled_from([1, batch])), 1, rows, columns) > 0.4
    elif masked == "numbers":
        mask = torch.randn(rows, columns)
    # Eager's own causal mask makes NaN where the scale is negative.
    scale = data.draw(st.sampled_from([None, 0.3] if masked == "causal" else [None, 0.3, -1.0]))
    options = {"is_causal": masked == "causal", "scale": scale, "enable_gqa": many > 1}
    model = Of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, **options))
    shapes = [(batch, groups * many, rows, width), (batch, groups, columns, width)]
    inputs = tuple(torch.randn(one) for one in (*shapes, (batch, groups, columns, out)))
    check(model, inputs, inputs, folder=tmp_path, decomposed=True)
