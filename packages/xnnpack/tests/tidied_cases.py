"""What a payload need not compute or store: zeros, slices of layers, lines, masks and tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from case_making import Case, case  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.export import Dim

IMAGE, LINE = (2, 3, 9, 11), (2, 3, 11)
TOKENS, WIDTH = 128, 64


def tidied() -> Iterator[Case]:
    """Yield all of them."""
    for group in (masks, padded, parted, lines, tables):
        yield from group()


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
        ("channels", nn.Conv2d(5, 4, 3), IMAGE, (1, 1, 0, 0, 1, 1), 0.0),
        ("line_channels", nn.Conv1d(5, 4, 3), LINE, (1, 1, 2, 0), 0.0),
    ):

        def call(x: Tensor, m: nn.Module, amounts: Any = amounts, value: Any = value) -> Any:
            return m(F.pad(x, amounts, value=value))

        yield case(f"padded_{name}", call, shape, parts=(layer,))

    def twice(x: Tensor, m: nn.Module) -> Any:
        x = F.pad(x, (1, 1, 1, 1))
        return m(x) + F.avg_pool2d(x, 3, 1, 1)[:, :1]

    yield case("padded_read_twice", twice, IMAGE, parts=(image,))
    returned: Any = lambda x, m: (m(y := F.pad(x, (2, 0))), y * 1)  # noqa: E731
    yield case("padded_returned", returned, LINE, parts=(line,))
    size = Dim("size", min=1, max=64)
    for name, axis, layer, amounts, shape, more in (
        ("batch", 0, image, (1, 1, 1, 1), IMAGE, (5, 3, 9, 11)),
        ("width", 3, image, (1, 1, 1, 1), IMAGE, (2, 3, 9, 30)),
        ("length", 2, line, (2, 0), LINE, (2, 3, 40)),
        ("lines", 0, line, (2, 0), LINE, (7, 3, 11)),
    ):
        yield case(
            f"padded_dynamic_{name}",
            lambda x, m, amounts=amounts: m(F.pad(x, amounts)),
            shape,
            parts=(layer,),
            dynamic=(({axis: size},),),
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

            def split(x: Tensor, m: Any, sizes: Any = sizes, axis: int = axis) -> Any:
                return m(x).split(sizes, axis)

            yield case(f"parted_{name}_{how}", split, shape, parts=(layer.eval(),))
    layer = nn.Conv2d(3, 64, 3)
    for name, take in {
        "half": lambda x: x[:, :32],
        "twice": lambda x: (x[:, :32], x[:, 32:] * 2, x[:, :32] * 3),
        "gap": lambda x: (x[:, :32], x[:, 33:]),
        "whole": lambda x: (x, *x.chunk(2, 1)),
        "height": lambda x: x.split((4, 3), 2),
        "glu": lambda x: F.glu(x, 1),
        "flat": lambda x: x.flatten(2).chunk(2, 1),
        "none": lambda x: x.sum(),
    }.items():
        yield case(f"parted_{name}", lambda x, m, take=take: take(m(x)), IMAGE, parts=(layer,))
    wide = nn.Linear(5, 96)
    heads: Any = lambda x, m: m(x.view(-1, 5)).view(2, 3, 96).split(32, 2)  # noqa: E731
    yield case("parted_view", heads, (2, 3, 5), parts=(wide,))
    shared: Any = lambda x, m: (*m(x).split(48, -1), m(x * 2))  # noqa: E731
    yield case("parted_shared", shared, (3, 5), parts=(wide,))
    yield case(
        *("parted_dynamic", lambda x, m: m(x).chunk(2, 1), IMAGE),
        parts=(layer,),
        dynamic=(({0: Dim("batch", max=64), 2: Dim("height", min=4, max=64)},),),
        others=((torch.randn(1, 3, 20, 11),), (torch.randn(5, 3, 4, 11),)),
    )


def lines() -> Iterator[Case]:
    """Yield models of convolutions over one dimension with arithmetic between them."""
    parts = (nn.Conv1d(3, 4, 3), nn.Conv1d(4, 4, 3, padding=1))
    slope = nn.PReLU(4)
    for name, function in {
        "chain": lambda x, y: torch.tanh(x) * torch.sigmoid(y) - 0.5,
        "column": lambda x, y: x * torch.arange(1.0, 5.0).reshape(4, 1) + y,
        "length": lambda x, y: x * torch.arange(9.0) + y.abs(),
        "batch": lambda x, y: x * torch.tensor([[[1.0]], [[2.0]]]) + y,
        "matrix": lambda x, y: x.mean(2, keepdim=True) * y.neg(),
        "parts": lambda x, y: x[:, :, 1:] / (y[:, :, :-1].exp() + 1),
    }.items():

        def call(x: Tensor, a: Any, b: Any, function: Any = function) -> Any:
            y = a(x)
            return b(function(y, y.relu())) + function(b(y), y)

        yield case(f"lines_{name}", call, LINE, parts=parts)
    yield case("lines_slope", lambda x, a, b, s: b(s(a(x))), LINE, parts=(*parts, slope))
    yield case("lines_returned", lambda x, a, b: (y := a(x).exp(), b(y)), LINE, parts=parts)
    for axis, more in ((0, (5, 3, 11)), (2, (2, 3, 40))):
        yield case(
            f"lines_dynamic_{axis}",
            lambda x, a, b: b(torch.tanh(a(x)) + 1) * 2 + a(x),
            LINE,
            parts=parts,
            dynamic=(({axis: Dim("size", min=4 if axis else 1, max=64)},),),
            others=((torch.randn(more),), (torch.randn(LINE),)),
        )
    yield case("lines_gated", Gated(), (2, 32, 20))


def masks() -> Iterator[Case]:
    """Yield masks that are steps, and some that are nearly."""
    lowest = torch.finfo(torch.float32).min
    causal = torch.full((64, 64), -torch.inf).triu(1)
    spoilt, wide = causal.clone(), torch.full((48, 90), lowest).triu(43)
    spoilt[40, 3] = 1.0
    for name, mask in {
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
    }.items():
        shape = (2, 3, 1, mask.shape[-1]) if name != "batches" else (2, 1, 64)

        def call(x: Tensor, mask: Tensor = mask) -> Any:
            return (x * 3 + mask).softmax(-1) - (mask.clamp(min=-5) * x)

        yield case(f"step_{name}", call, shape)
    yield case("step_attention", twice_causal, *((1, 2, 64, 8),) * 3)


def twice_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return two attentions that have one mask."""
    once = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.scaled_dot_product_attention(q, k, once, is_causal=True)


class Rotary(nn.Module):
    """Turns each token by its position, in halves of its width as language models do."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        exponents = torch.arange(0, WIDTH, 2).float() / WIDTH
        self.register_buffer("frequencies", 10_000.0**-exponents)

    def forward(self, x: Tensor) -> Tensor:
        """Return the turned tokens."""
        positions = torch.arange(x.shape[-2]).float()
        angles = positions[:, None] * self.get_buffer("frequencies")
        angles = torch.cat([angles, angles], -1)[None, None]
        left, right = x.chunk(2, -1)
        turned = torch.cat([-right, left], -1)
        return x * (angles.cos() * self.factor) + turned * (angles.sin() * self.factor)


class Places(nn.Module):
    """Adds to each place of an image what its row and its column say, together made narrower."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.flat = flat
        torch.manual_seed(0)
        self.narrow = nn.Conv2d(8, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the image, or its places in a row."""
        height, width = x.shape[-2:]
        parts = torch.arange(1.0, 5.0)[:, None, None]
        rows = (torch.arange(height)[:, None] / parts).sin().expand(4, height, width)
        columns = (torch.arange(width)[None] / parts).cos().expand(4, height, width)
        added: Tensor = self.narrow(torch.cat([rows, columns])[None])
        if self.flat:
            x, added = x.flatten(2), added.flatten(2)
            return x.transpose(1, 2) + added.transpose(1, 2)
        return F.relu(x + added)


def beside_mask(large: float, x: Tensor) -> Tensor:
    """Add what looks like its first row but for numbers that the mask's are far above."""
    table = torch.sin(torch.arange(float(TOKENS * WIDTH)).reshape(TOKENS, WIDTH))
    return x + torch.cat([torch.full((TOKENS, WIDTH // 2), large), table], 1)[:, :WIDTH]


def tables() -> Iterator[Case]:
    """Yield tables that a program computes of little, and some that only look so."""
    tokens = (1, 2, TOKENS, WIDTH)
    yield case("rotary", Rotary(), tokens)
    yield case("rotary_scaled", Rotary(1.25), tokens)
    yield case("places", Places(flat=False), (1, 12, 20, 24))
    yield case("places_in_a_row", Places(flat=True), (1, 12, 24, 24))

    def far(x: Tensor) -> Tensor:
        """Use sines beyond those that the runtime has."""
        angles = torch.arange(1.0, TOKENS + 1)[:, None] * torch.tensor([1.0, 9e8]).repeat(32)
        return x + angles.sin()

    def small(x: Tensor) -> Tensor:
        rows = torch.arange(float(TOKENS))[:, None] / TOKENS
        return x * (rows - torch.arange(float(WIDTH))[None] / WIDTH)

    def nearly(x: Tensor) -> Tensor:
        table = torch.arange(TOKENS)[:, None] + torch.arange(WIDTH)[None].float()
        return x * (table + torch.eye(TOKENS, WIDTH))

    for one in (far, small, nearly):
        yield case(f"table_{one.__name__}", one, tokens)
    for large in (-1e4, -1e9, torch.finfo(torch.float32).min):
        yield case(f"masked_by_{large:.0e}", lambda x, n=large: beside_mask(n, x), tokens)
