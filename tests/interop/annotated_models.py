"""Small models of many kinds, for what a quantiser writes into them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "packages/xnnpack/tests"))
from quantized_models import Decoder, Inverted, Mlp, SmallCnn, SmallMobileNet

Tensor = torch.Tensor


def block(inside: int, outside: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution with its norm and a relu."""
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, 1, groups=groups),
        nn.BatchNorm2d(outside),
        nn.ReLU(),
    )


class Function(nn.Module):
    """A model of some layers and a function that calls them."""

    def __init__(self, function: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return what the function returns."""
        return self.function(self, *inputs)


def residual(model: Any, x: Tensor) -> Any:
    return F.relu(x + model.second(model.first(x)))


def inception(model: Any, x: Tensor) -> Any:
    pooled = F.max_pool2d(x, 3, 1, 1)
    return torch.cat([model.one(x), model.two(x), model.three(pooled)], 1)


def dense(model: Any, x: Tensor) -> Any:
    y = model.one(x)
    z = model.two(torch.cat([x, y], 1))
    return torch.cat([x, y, z], 1)


def fire(model: Any, x: Tensor) -> Any:
    x = F.relu(model.squeeze(x))
    return torch.cat([F.relu(model.one(x)), F.relu(model.three(x))], 1).mean([2, 3])


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


LINEAR = nn.Linear
IMAGE, WIDE_IMAGE, ROWS, TOKENS = (2, 3, 16, 16), (2, 8, 8, 8), (3, 16), (1, 6, 16)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "cnn": (SmallCnn, (IMAGE,)),
    "mlp": (Mlp, ((3, 64),)),
    "decoder": (Decoder, ((1, 12, 64),)),
    "mobilenet": (SmallMobileNet, (IMAGE,)),
    "inverted": (lambda: Inverted(8, 8, 1), (WIDE_IMAGE,)),
    "vgg": (
        lambda: nn.Sequential(
            *(block(3, 8), nn.MaxPool2d(2, 2), block(8, 8), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4)),
        ),
        (IMAGE,),
    ),
    "residual": (lambda: Function(residual, first=block(8, 8), second=block(8, 8)), (WIDE_IMAGE,)),
    "inception": (
        lambda: Function(
            inception, one=block(8, 8), two=nn.Conv2d(8, 8, 1), three=nn.Conv2d(8, 8, 1)
        ),
        (WIDE_IMAGE,),
    ),
    "dense": (lambda: Function(dense, one=block(8, 8), two=block(16, 8)), (WIDE_IMAGE,)),
    "fire": (
        lambda: Function(
            fire,
            squeeze=nn.Conv2d(8, 4, 1),
            one=nn.Conv2d(4, 8, 1),
            three=nn.Conv2d(4, 8, 3, padding=1),
        ),
        (WIDE_IMAGE,),
    ),
    "shuffle": (lambda: Function(shuffle, one=block(4, 4)), (WIDE_IMAGE,)),
    "squeeze_excite": (
        lambda: Function(
            squeeze_excite, one=block(8, 8), down=nn.Conv2d(8, 4, 1), up=nn.Conv2d(4, 8, 1)
        ),
        (WIDE_IMAGE,),
    ),
    "unet": (
        lambda: Function(
            unet,
            one=block(8, 8),
            two=block(8, 8),
            up=nn.ConvTranspose2d(8, 8, 2, 2),
            last=nn.Conv2d(16, 2, 1),
        ),
        (WIDE_IMAGE,),
    ),
    "grouped": (
        lambda: nn.Sequential(block(8, 8, groups=2), nn.Conv2d(8, 16, 1, groups=4)),
        (WIDE_IMAGE,),
    ),
    "depthwise": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1)),
        (WIDE_IMAGE,),
    ),
    "transposed": (
        lambda: nn.Sequential(
            *(nn.ConvTranspose2d(8, 4, 3), nn.ConvTranspose2d(4, 4, 2, groups=2), nn.ReLU()),
        ),
        (WIDE_IMAGE,),
    ),
    "rows_of_samples": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3)),
        ((1, 4, 12),),
    ),
    "attention": (
        lambda: Function(attention, both=LINEAR(16, 48), out=LINEAR(16, 16)),
        (TOKENS,),
    ),
    "gated": (
        lambda: Function(gated, gate=LINEAR(16, 32), up=LINEAR(16, 32), down=LINEAR(32, 16)),
        (TOKENS,),
    ),
    "scalars": (lambda: Function(scalars, one=LINEAR(16, 16)), (ROWS,)),
    "mixer": (
        lambda: Function(
            mixer,
            norm=nn.LayerNorm(16),
            tokens=nn.Sequential(LINEAR(6, 12), nn.GELU(), LINEAR(12, 6)),
            channels=nn.Sequential(LINEAR(16, 12), nn.GELU(), LINEAR(12, 16)),
        ),
        (TOKENS,),
    ),
    "two_inputs": (
        lambda: Function(two_inputs, one=LINEAR(16, 16), two=LINEAR(16, 16, bias=False)),
        (ROWS, ROWS),
    ),
    "same_padding": (
        lambda: Function(same_padding, one=nn.Conv2d(8, 4, 3, padding="same")),
        (WIDE_IMAGE,),
    ),
    "used_twice": (lambda: Function(used_twice, one=nn.Conv2d(8, 4, 3)), (WIDE_IMAGE,)),
    "autoencoder": (
        lambda: nn.Sequential(
            *(nn.Conv2d(8, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Sigmoid()),
            *(nn.ConvTranspose2d(4, 8, 2, 2), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Tanh()),
        ),
        (WIDE_IMAGE,),
    ),
}


def annotated_model(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a model in evaluation mode, with random weights, and its inputs.

    Args:
        name: One of ``MODELS``.
    """
    make, shapes = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make().eval(), tuple(torch.randn(shape) for shape in shapes)
