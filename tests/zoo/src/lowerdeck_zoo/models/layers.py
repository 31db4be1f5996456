"""Small stacks of layers of many kinds, such as quantisers take."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch import Tensor, nn

from lowerdeck_zoo.program import Of, Program, drawn, normal


class SmallCnn(nn.Module):
    """Convolutions, one depthwise, with batch norms, an addition, a join, pools and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.point = nn.Conv2d(16, 16, 1)
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2, 2)
        y = x + self.point(F.relu(self.deep(x)))
        y = torch.cat([x, y], 1)
        result: Tensor = self.last(F.adaptive_avg_pool2d(y, 1).flatten(1))
        return result


class Mlp(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 128), nn.Linear(128, 96), nn.Linear(96, 10)])

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        result: Tensor = self.layers[-1](x)
        return result


class Block(nn.Module):
    """One block of a decoder: causal attention and a gated layer, both after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens, mixed."""
        y = self.before(x)
        batch, length, width = y.shape
        query, key, value = (
            layer(y).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.between(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Decoder(nn.Module):
    """Two blocks over tokens that are embedded already."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(64, 4), Block(64, 4))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of the next tokens."""
        result: Tensor = self.head(self.norm(self.blocks(x)))
        return result


class Inverted(nn.Module):
    """One block of a MobileNet."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inside
        self.added = stride == 1 and inside == outside
        self.layers = nn.Sequential(
            *(nn.Conv2d(inside, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            *(nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, outside, 1, bias=False), nn.BatchNorm2d(outside)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return features."""
        y: Tensor = self.layers(x)
        return x + y if self.added else y


class SmallMobileNet(nn.Module):
    """A stem, three blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()
        )
        self.blocks = nn.Sequential(Inverted(8, 8, 1), Inverted(8, 16, 2), Inverted(16, 16, 1))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        result: Tensor = self.head(self.blocks(self.stem(x)).mean([2, 3]))
        return result


def block(inside: int, outside: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution with its norm and a relu."""
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, 1, groups=groups), nn.BatchNorm2d(outside), nn.ReLU()
    )


def shuffle(model: Any, x: Tensor) -> Any:
    left, right = x.chunk(2, 1)
    y = torch.cat([left, model.one(right)], 1)
    batch, channels, height, width = y.shape
    y = y.view(batch, 2, channels // 2, height, width).transpose(1, 2)
    return y.reshape(batch, channels, height, width)


def squeeze_excite(model: Any, x: Tensor) -> Any:
    x = model.one(x)
    y = F.adaptive_avg_pool2d(x, 1)
    return x * F.hardsigmoid(model.up(F.relu(model.down(y))))


def unet(model: Any, x: Tensor) -> Any:
    one = model.one(x)
    two = F.relu(model.up(model.two(F.max_pool2d(one, 2, 2))))
    return model.last(torch.cat([one, two], 1))


def attention(model: Any, x: Tensor) -> Any:
    query, key, value = model.both(x).chunk(3, -1)
    return model.out(F.scaled_dot_product_attention(query, key, value))


def gated(model: Any, x: Tensor) -> Any:
    return model.down(F.silu(model.gate(x)) * model.up(x))


def scalars(model: Any, x: Tensor) -> Any:
    return F.relu(model.one(x * 2.0 + 0.5) * 3.0)


def mixer(model: Any, x: Tensor) -> Any:
    y = model.tokens(model.norm(x).transpose(1, 2)).transpose(1, 2)
    x = x + y
    return x + model.channels(x)


def two_inputs(model: Any, x: Tensor, y: Tensor) -> Any:
    return F.relu(model.one(x) * model.two(y))


def same_padding(model: Any, x: Tensor) -> Any:
    return F.hardtanh(model.one(x)).flatten(1)


def used_twice(model: Any, x: Tensor) -> Any:
    y = model.one(x)
    return F.relu(y) + y


IMAGE, WIDE_IMAGE, ROWS, TOKENS = (2, 3, 16, 16), (2, 8, 8, 8), (3, 16), (1, 6, 16)

PROGRAMS = (
    Program("small_cnn", SmallCnn, normal(*IMAGE)),
    Program("small_mlp", Mlp, normal(*(3, 64))),
    Program("small_decoder", Decoder, normal(*(1, 12, 64))),
    Program("small_mobilenet", SmallMobileNet, normal(*IMAGE)),
    Program("inverted", lambda: Inverted(8, 8, 1), normal(*WIDE_IMAGE)),
    Program("shuffle", lambda: Of(shuffle, one=block(4, 4)), normal(*WIDE_IMAGE)),
    Program(
        "squeeze_excite",
        lambda: Of(
            squeeze_excite, one=block(8, 8), down=nn.Conv2d(8, 4, 1), up=nn.Conv2d(4, 8, 1)
        ),
        normal(*WIDE_IMAGE),
    ),
    Program(
        "small_unet",
        lambda: Of(
            unet,
            one=block(8, 8),
            two=block(8, 8),
            up=nn.ConvTranspose2d(8, 8, 2, 2),
            last=nn.Conv2d(16, 2, 1),
        ),
        normal(*WIDE_IMAGE),
    ),
    Program(
        "grouped",
        lambda: nn.Sequential(block(8, 8, groups=2), nn.Conv2d(8, 16, 1, groups=4)),
        normal(*WIDE_IMAGE),
    ),
    Program(
        "depthwise",
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1)),
        normal(*WIDE_IMAGE),
    ),
    Program(
        "transposed",
        lambda: nn.Sequential(
            *(nn.ConvTranspose2d(8, 4, 3), nn.ConvTranspose2d(4, 4, 2, groups=2), nn.ReLU())
        ),
        normal(*WIDE_IMAGE),
    ),
    Program(
        "rows_of_samples",
        lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3)),
        normal(*(1, 4, 12)),
    ),
    Program(
        "gated",
        lambda: Of(gated, gate=nn.Linear(16, 32), up=nn.Linear(16, 32), down=nn.Linear(32, 16)),
        normal(*TOKENS),
    ),
    Program("scaled_linear", lambda: Of(scalars, one=nn.Linear(16, 16)), normal(*ROWS)),
    Program(
        "mixer",
        lambda: Of(
            mixer,
            norm=nn.LayerNorm(16),
            tokens=nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)),
            channels=nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 16)),
        ),
        normal(*TOKENS),
    ),
    Program(
        "two_inputs",
        lambda: Of(two_inputs, one=nn.Linear(16, 16), two=nn.Linear(16, 16, bias=False)),
        drawn(lambda: (torch.randn(ROWS), torch.randn(ROWS))),
    ),
    Program(
        "same_padding",
        lambda: Of(same_padding, one=nn.Conv2d(8, 4, 3, padding="same")),
        normal(*WIDE_IMAGE),
    ),
    Program("used_twice", lambda: Of(used_twice, one=nn.Conv2d(8, 4, 3)), normal(*WIDE_IMAGE)),
)
