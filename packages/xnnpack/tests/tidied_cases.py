"""What a payload need not compute: zeros at convolutions, slices of layers, lines as images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from case_making import Case, case  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.export import Dim

IMAGE, LINE = (2, 3, 9, 11), (2, 3, 11)


class Gated(nn.Module):
    """Two gated convolutions over time, whose inputs are padded on the left and added again."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Conv1d(32, 64, 2, dilation=d) for d in (1, 2))
        self.norm = nn.BatchNorm1d(32).eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of all."""
        for number, gate in enumerate(self.gates):
            left, right = gate(F.pad(x, (2**number, 0))).chunk(2, dim=1)
            x = x + self.norm(torch.tanh(left) * torch.sigmoid(right) + 0.5)
        return x


def padded() -> Iterator[Case]:
    """Yield convolutions of what a node pads with zeros, or with something else."""
    image, line = nn.Conv2d(3, 4, 3, padding=1), nn.Conv1d(3, 4, 2, dilation=2)
    deep, point = nn.Conv2d(3, 3, 3, stride=2, groups=3), nn.Conv2d(3, 4, 1)
    for name, layer, shape, amounts, value in (
        ("image", image, IMAGE, (1, 2, 0, 3), 0.0),
        ("image_far", image, IMAGE, (7, 0, 5, 0), 0.0),
        ("line", line, LINE, (2, 0), 0.0),
        ("line_right", line, LINE, (0, 5), None),
        ("deep", deep, IMAGE, (0, 1, 0, 1), 0.0),
        ("point", point, IMAGE, (1, 1, 1, 1), 0.0),
        ("with_ones", image, IMAGE, (1, 1, 1, 1), 1.0),
        ("channels", nn.Conv2d(5, 4, 3), (2, 3, 9, 11), (1, 1, 0, 0, 1, 1), 0.0),
        ("line_channels", nn.Conv1d(5, 4, 3), LINE, (1, 1, 2, 0), 0.0),
    ):

        def call(
            x: Tensor, m: nn.Module, amounts: object = amounts, value: object = value
        ) -> Tensor:
            return m(F.pad(x, amounts, value=value))  # type: ignore[arg-type, no-any-return]

        yield case(f"padded_{name}", call, shape, parts=(layer,))

    def twice(x: Tensor, m: nn.Module) -> Any:
        x = F.pad(x, (1, 1, 1, 1))
        return m(x) + F.avg_pool2d(x, 3, 1, 1)[:, :1]

    yield case("padded_read_twice", twice, IMAGE, parts=(image,))
    yield case(
        "padded_returned",
        lambda x, m: (m(y := F.pad(x, (2, 0))), y * 1),
        LINE,
        parts=(line,),
    )
    size = Dim("size", min=1, max=64)
    for name, shape, dynamic, layer, amounts, more in (
        ("batch", IMAGE, {0: size}, image, (1, 1, 1, 1), (5, 3, 9, 11)),
        ("width", IMAGE, {3: size}, image, (1, 1, 1, 1), (2, 3, 9, 30)),
        ("length", LINE, {2: size}, line, (2, 0), (2, 3, 40)),
        ("lines", LINE, {0: size}, line, (2, 0), (7, 3, 11)),
    ):
        yield case(
            f"padded_dynamic_{name}",
            lambda x, m, amounts=amounts: m(F.pad(x, amounts)),
            shape,
            parts=(layer,),
            dynamic=((dynamic,),),
            others=((torch.randn(more),), (torch.randn(shape),)),
        )


def parted() -> Iterator[Case]:
    """Yield layers whose results are taken apart, in ways that can be layers and in others."""
    layers = {
        "conv": (nn.Conv2d(3, 96, 3), IMAGE),
        "conv_norm": (nn.Sequential(nn.Conv2d(3, 96, 3, bias=False), nn.BatchNorm2d(96)), IMAGE),
        "conv1d": (nn.Conv1d(3, 96, 3), LINE),
        "conv_groups": (nn.Conv2d(4, 96, 3, groups=2), (2, 4, 9, 11)),
        "transposed": (nn.ConvTranspose2d(3, 96, 3), IMAGE),
        "linear": (nn.Linear(5, 96), (2, 3, 5)),
        "linear_relu": (nn.Sequential(nn.Linear(5, 96), nn.ReLU()), (3, 5)),
    }
    for name, (layer, shape) in layers.items():
        axis = -1 if "linear" in name else 1
        for how, sizes in {"even": (32, 32, 32), "uneven": (64, 32), "small": (80, 16)}.items():
            yield case(
                f"parted_{name}_{how}",
                lambda x, m, sizes=sizes, axis=axis: m(x).split(sizes, axis),
                shape,
                parts=(layer.eval(),),
            )
    layer = nn.Conv2d(3, 64, 3)
    takes = {
        "half": lambda x: x[:, :32],
        "twice": lambda x: (x[:, :32], x[:, 32:] * 2, x[:, :32] * 3),
        "gap": lambda x: (x[:, :32], x[:, 33:]),
        "whole": lambda x: (x, *x.chunk(2, 1)),
        "height": lambda x: x.split((4, 3), 2),
        "glu": lambda x: F.glu(x, 1),
        "flat": lambda x: x.flatten(2).chunk(2, 1),
        "none": lambda x: x.sum(),
    }
    for name, take in takes.items():
        yield case(f"parted_{name}", lambda x, m, take=take: take(m(x)), IMAGE, parts=(layer,))

    def heads(x: Tensor, m: nn.Module) -> Any:
        return m(x.view(-1, 5)).view(2, 3, 96).split(32, 2)

    yield case("parted_view", heads, (2, 3, 5), parts=(nn.Linear(5, 96),))

    def shared(x: Tensor, m: nn.Module) -> Any:
        return (*m(x).chunk(2, -1), m(x * 2))

    yield case("parted_shared", shared, (3, 5), parts=(nn.Linear(5, 64),))
    yield case(
        "parted_dynamic",
        lambda x, m: m(x).chunk(2, 1),
        IMAGE,
        parts=(layer,),
        dynamic=(({0: Dim("batch", max=64), 2: Dim("height", min=4, max=64)},),),
        others=((torch.randn(1, 3, 20, 11),), (torch.randn(5, 3, 4, 11),)),
    )


def lines() -> Iterator[Case]:
    """Yield models of convolutions over one dimension with arithmetic between them."""
    first, second = nn.Conv1d(3, 4, 3), nn.Conv1d(4, 4, 3, padding=1)
    slope = nn.PReLU(4)
    between = {
        "chain": lambda x, y: torch.tanh(x) * torch.sigmoid(y) - 0.5,
        "column": lambda x, y: x * torch.arange(1.0, 5.0).reshape(4, 1) + y,
        "length": lambda x, y: x * torch.arange(9.0) + y.abs(),
        "batch": lambda x, y: x * torch.tensor([[[1.0]], [[2.0]]]) + y,
        "matrix": lambda x, y: x.mean(2, keepdim=True) * y.neg(),
        "parts": lambda x, y: x[:, :, 1:] / (y[:, :, :-1].exp() + 1),
    }
    for name, function in between.items():

        def call(x: Tensor, a: nn.Module, b: nn.Module, function: object = function) -> Tensor:
            y = a(x)
            return b(function(y, y.relu())) + function(b(y), y)  # type: ignore[operator, no-any-return]

        yield case(f"lines_{name}", call, LINE, parts=(first, second))
    yield case("lines_slope", lambda x, a, b: b(slope(a(x))), LINE, parts=(first, second))
    yield case(
        "lines_returned", lambda x, a, b: (y := a(x).exp(), b(y)), LINE, parts=(first, second)
    )
    for name, sizes in {
        "batch": {0: Dim("batch", max=64)},
        "length": {2: Dim("n", min=4, max=64)},
    }.items():
        grown = (5, 3, 11) if name == "batch" else (2, 3, 40)
        yield case(
            f"lines_dynamic_{name}",
            lambda x, a, b: b(torch.tanh(a(x)) + 1) * 2 + a(x),
            LINE,
            parts=(first, second),
            dynamic=((sizes,),),
            others=((torch.randn(grown),), (torch.randn(LINE),)),
        )
    yield case("lines_gated", lambda x, m: m(x), (2, 32, 20), parts=(Gated(),))


def steps() -> Iterator[Case]:
    """Yield masks that are steps, and some that are nearly."""
    lowest = torch.finfo(torch.float32).min
    causal = torch.full((64, 64), -torch.inf).triu(1)
    spoilt, wide = causal.clone(), torch.full((48, 90), lowest).triu(43)
    spoilt[40, 3] = 1.0
    masks = {
        "causal": causal,
        "lowest": torch.full((1, 1, 70, 70), lowest).triu(1),
        "wide": wide,
        "tall": torch.full((90, 48), -100.0).triu(1),
        "ahead": torch.full((64, 64), -100.0).triu(9),
        "below": torch.full((64, 64), -100.0).triu(0),
        "other_side": torch.full((64, 64), -100.0).tril(-1),
        "positive": torch.full((64, 64), 3.0).triu(1),
        "spoilt": spoilt,
        "small": causal[:30, :30],
        "batches": causal.expand(2, 64, 64).clone(),
        "window": torch.full((64, 64), -torch.inf).triu(1) + torch.full((64, 64), -100.0).tril(-9),
    }
    for name, mask in masks.items():
        shape = (2, 3, 1, mask.shape[-1]) if name != "batches" else (2, 1, 64)

        def call(x: Tensor, mask: Tensor = mask) -> Any:
            return (x * 3 + mask).softmax(-1) - (mask.clamp(min=-5) * x)

        yield case(f"step_{name}", call, shape)
    shape = (1, 2, 64, 8)
    yield case(
        "step_attention",
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, F.scaled_dot_product_attention(q, k, v, is_causal=True), is_causal=True
        ),
        shape,
        shape,
        shape,
    )


def tidied() -> Iterator[Case]:
    """Yield all of them."""
    yield from steps()
    yield from padded()
    yield from parted()
    yield from lines()
