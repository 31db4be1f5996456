"""Small models, for each thing that the XNNPACK backend can emit, with inputs for them.

Functions of the same inputs are one model, so that they are exported and lowered at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from case_making import Case, case  # type: ignore[import-not-found]
from mask_cases import attend, masks  # type: ignore[import-not-found]
from tidied_cases import tidied  # type: ignore[import-not-found]
from torch import nn
from torch.export import Dim

Tensor = torch.Tensor
IMAGE, LINE, VOLUME = (2, 3, 4, 5), (2, 3, 11), (2, 4, 5, 7, 6)


def normed(channels: int, kind: Any = nn.BatchNorm2d, **options: Any) -> Any:
    layer: Any = kind(channels, **options)
    nn.init.normal_(layer.running_mean)
    nn.init.uniform_(layer.running_var, 0.3, 2.0)
    if layer.weight is not None:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def cases() -> Iterator[Case]:
    """Yield all cases, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for group in (
            *(elementwise, arithmetic, convolutions, linear, pools, volumes, norms, moves),
            *(choices, paddings, reductions, composed, outputs, layouts, recurrent, dynamic),
            *(masks, tidied),
        ):
            yield from group()


def elementwise() -> Iterator[Case]:
    functions = {
        **{name: getattr(torch, name) for name in ("abs", "ceil", "cos", "exp", "floor", "neg")},
        **{name: getattr(torch, name) for name in ("reciprocal", "sigmoid", "sin", "square")},
        **{name: getattr(F, name) for name in ("hardsigmoid", "hardswish", "silu", "relu6")},
        **{name: getattr(F, name) for name in ("gelu", "tanh", "relu")},
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.25),
        "clamp": lambda x: torch.clamp(x, -0.3, 0.7),
        "clamp_low": lambda x: torch.clamp(x, min=0.1),
        "clamp_high": lambda x: torch.clamp_max(x, 0.1),
        "clamp_crossed": lambda x: torch.clamp(x, 0.5, -0.5),
        "elu": lambda x: F.elu(x, alpha=0.7),
        "elu_scaled": lambda x: torch.ops.aten.elu(3 * x, 0.7, 1.3, 0.4),
        "selu": lambda x: F.selu(3 * x),
        "leaky_relu": lambda x: F.leaky_relu(x, 0.3),
        "pow1": lambda x: torch.pow(x, 1),
        "pow2": lambda x: torch.pow(x, 2),
        "pow3": lambda x: x**3,
    }
    yield case("elementwise", functions, (2, 3, 5))
    whole = {
        "celu": lambda x: F.celu(3 * x, 0.6),
        "softplus": lambda x: F.softplus(10 * x),
        "softplus_scaled": lambda x: F.softplus(10 * x, 0.7, 30),
        "mish": lambda x: F.mish(20 * x),
    }
    yield case("whole_functions", whole, (2, 3, 5))
    yield case("of_a_number", torch.relu, ())
    yield case("of_six_dimensions", torch.sigmoid, (1, 2, 1, 3, 2, 2))
    positive = {
        "log": torch.log,
        "rsqrt": torch.rsqrt,
        "sqrt": torch.sqrt,
        "pow_half": lambda x: x**0.5,
        "pow_minus_half": lambda x: x**-0.5,
    }
    yield case("positive", positive, torch.rand(2, 9) + 0.01)
    # A node without neighbours has degree 0.
    degrees = {
        "rsqrt": lambda a: a.sum(1).rsqrt(),
        "pow": lambda a: a.sum(1) ** -0.5,
        "rms_norm": lambda a: a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6),
    }
    yield case("of_zero", degrees, torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 0, 0]]))
    for shape in ((3, 4), (2, 3, 5), (2, 3, 4, 5), (2, 3, 2, 2, 3)):
        layers = {str(count): nn.PReLU(count) for count in (1, shape[1])}
        for layer in layers.values():
            nn.init.uniform_(layer.weight, -1.0, 1.0)
        yield case(f"prelu_{len(shape)}d", layers, shape)
    for axis in (1, -1):
        yield case(f"glu_{axis}", lambda x, axis=axis: F.glu(x, axis), (2, 6, 3, 4))
    yield case("glu_between", nn.Sequential(nn.Conv2d(3, 8, 3), nn.GLU(1)), (1, 3, 6, 7))


def arithmetic() -> Iterator[Case]:
    for name, shapes in {
        "rows": ((2, 3, 4), (4,)),
        "outer": ((3, 1), (1, 5)),
        "channels": ((2, 3, 4, 5), (3, 1, 1)),
        "six": ((2, 1, 3, 1, 2, 2), (4, 1, 5, 1, 1)),
        "number": ((2, 3), ()),
    }.items():
        functions = {
            "add": torch.add,
            "mul": torch.mul,
            "sub": lambda x, y: y - x,
            "minimum": torch.minimum,
            "maximum": torch.maximum,
            "alpha": lambda x, y: torch.add(x, y, alpha=2.5),
            "rsub": lambda x, y: torch.rsub(x, y, alpha=2),
        }
        yield case(f"pair_{name}", functions, *shapes)
    functions = {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "div": lambda x, y: x / (y * y + 1),
        "alpha_number": lambda x, y: torch.sub(x, 2.0, alpha=-3),
        "rsub_number": lambda x, y: 1.5 - x,
        "numbers": lambda x, y: (x * 2 + 1) / 4 - 0.125,
        "divided_number": lambda x, y: 2 / (x * x + 1),
        "add_relu": lambda x, y: torch.relu(x + y),
        "sub_relu": lambda x, y: torch.relu(x - y),
        "mul_relu": lambda x, y: torch.relu(x * y),
        "div_clamp": lambda x, y: torch.clamp(x / 0.5, -1, 1),
        "max_relu": lambda x, y: torch.relu(torch.maximum(x, y)),
        "read_twice": lambda x, y: torch.relu(x + y) * (x + y),
    }
    yield case("arithmetic", functions, (2, 3), (2, 3))


def convolutions() -> Iterator[Case]:
    layers: dict[str, nn.Module] = {
        "plain": nn.Conv2d(4, 6, (3, 2)),
        "no_bias": nn.Conv2d(4, 6, (3, 2), bias=False),
        "stride": nn.Conv2d(4, 6, (3, 2), stride=(2, 3)),
        "padding": nn.Conv2d(4, 6, (3, 2), padding=(1, 2)),
        "dilation": nn.Conv2d(4, 6, (3, 2), dilation=2),
        "groups": nn.Conv2d(4, 6, (3, 2), groups=2),
        "same": nn.Conv2d(4, 6, 3, padding="same"),
        "same_dilated": nn.Conv2d(4, 6, (3, 2), padding="same", dilation=(1, 2)),
        "valid": nn.Conv2d(4, 6, (3, 2), padding="valid"),
        # An even kernel: torch puts the odd row and the odd column at the end.
        "same_even": nn.Conv2d(4, 6, (4, 2), padding="same"),
        "same_even_dilated": nn.Conv2d(4, 6, (2, 4), padding="same", dilation=(1, 3)),
        "same_one_axis": nn.Conv2d(4, 6, (1, 4), padding="same"),
        "1x1": nn.Conv2d(4, 6, 1),
        "depthwise": nn.Conv2d(4, 4, 3, padding=1, groups=4),
        "depthwise_times_3": nn.Conv2d(4, 12, 3, stride=2, groups=4, bias=False),
        "transposed": nn.ConvTranspose2d(4, 6, 3),
        "transposed_groups": nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2, padding=1),
        "transposed_more": nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, dilation=2),
        "bn": nn.Sequential(nn.Conv2d(4, 6, 3), normed(6)),
        "bn_plain": nn.Sequential(nn.Conv2d(4, 6, 3), normed(6, affine=False)),
        "bn_relu6": nn.Sequential(
            nn.Conv2d(4, 6, 3, bias=False), normed(6), nn.ReLU6(inplace=True)
        ),
        "depthwise_bn": nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), normed(8), nn.ReLU()),
        "transposed_bn": nn.Sequential(
            nn.ConvTranspose2d(4, 6, 3, groups=2), normed(6), nn.ReLU()
        ),
    }
    for name, layer in layers.items():
        if name in ("plain", "same_even", "depthwise", "transposed", "bn_relu6"):
            yield case(f"conv_{name}", layer, (2, 4, 9, 8))
    yield case("conv", layers, (2, 4, 9, 8))
    channel: dict[str, nn.Module] = {
        "wide": nn.Conv2d(1, 5, 3),
        "point": nn.Conv2d(1, 1, 1),
        "point_relu": nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.ReLU()),
    }
    for shift in (-0.3, 0.3):
        point = nn.Conv2d(1, 1, 1)
        nn.init.constant_(point.weight, 2.0)
        nn.init.constant_(point.bias, shift)  # type: ignore[arg-type]  # it has a bias
        channel[f"point_clamp_{shift}"] = nn.Sequential(point, nn.Hardtanh(-0.5, 0.4))
    yield case("conv_of_one_channel", channel, (2, 1, 6, 6))
    lines = {
        "strided": nn.Conv1d(3, 5, 3, stride=2, padding=1),
        "chain": nn.Sequential(
            *(nn.Conv1d(3, 4, 3), normed(4, nn.BatchNorm1d), nn.ReLU()),
            nn.Conv1d(4, 4, 2, groups=4, dilation=2),
        ),
        "same": nn.Conv1d(3, 5, 3, padding="same"),
        "transposed": nn.ConvTranspose1d(3, 6, 3, stride=2, groups=3),
    }
    yield case("conv1d", lines, LINE)


def linear() -> Iterator[Case]:
    layer, weight = nn.Linear(5, 7), nn.Linear(5, 7, bias=False).requires_grad_(False)
    for shape in ((5,), (2, 3, 5), (2, 3, 4, 5)):
        yield case(f"linear_{len(shape)}d", layer, shape)
    layers = {
        "plain": layer,
        "no_bias": weight,
        "relu": nn.Sequential(nn.Linear(5, 7), nn.ReLU()),
        "bn": nn.Sequential(nn.Linear(5, 7), normed(7, nn.BatchNorm1d), nn.ReLU()),
    }
    yield case("linear", layers, (3, 5))
    yield case("computed_linear", F.linear, (3, 5), (7, 5), (7,))
    yield case("mm", torch.mm, (3, 5), (5, 7))
    yield case("bmm", torch.bmm, (2, 3, 5), (2, 5, 7))
    yield case("matmul", torch.matmul, (2, 1, 3, 5), (4, 5, 7))
    yield case("matmul_2d", torch.matmul, (2, 3, 5), (5, 7))
    bias = nn.Linear(5, 7).requires_grad_(False)
    yield case("addmm", lambda x, m: torch.addmm(m.bias, x, m.weight.t()), (3, 5), parts=(bias,))
    yield case("addmm_two_computed", torch.addmm, (7,), (3, 5), (5, 7))
    parts = {"parts": (bias,)}
    yield case("constant_weight", lambda x, b, m: F.linear(x, m.weight, b), (3, 5), (7,), **parts)
    yield case("constant_bias", lambda x, w, m: F.linear(x, w, m.bias).relu(), (3, 5), (7, 5),
               **parts)  # fmt: skip
    yield case("linear_513", nn.Linear(513, 4), (2, 513))


def pools() -> Iterator[Case]:
    layers: dict[str, Any] = {
        "max": nn.MaxPool2d(2),
        "max_padded": nn.MaxPool2d(3, 2, 1),
        "max_dilated": nn.MaxPool2d((3, 2), dilation=2, stride=1),
        "max_ceil": nn.MaxPool2d(3, 2, ceil_mode=True),
        "max_ceil_padded": nn.MaxPool2d(4, 3, 2, ceil_mode=True),
        "max_sparse": nn.MaxPool2d(1, 2),
        "max_relu": nn.Sequential(nn.MaxPool2d(2), nn.ReLU()),
        "avg": nn.AvgPool2d(2),
        "avg_counted": nn.AvgPool2d(3, 2, 1),
        "avg_uncounted": nn.AvgPool2d(3, padding=1, count_include_pad=False),
        "avg_ceil": nn.AvgPool2d(3, 2, ceil_mode=True),
        "avg_ceil_counted": nn.AvgPool2d(4, 3, 2, ceil_mode=True),
        "avg_ceil_uncounted": nn.AvgPool2d(4, 3, 1, ceil_mode=True, count_include_pad=False),
        "adaptive_1": nn.AdaptiveAvgPool2d(1),
        "adaptive_11_2": nn.AdaptiveAvgPool2d((11, 2)),
        "up": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        "down": lambda x: F.interpolate(x, size=(5, 7), mode="bilinear"),
        "corners": lambda x: F.interpolate(x, (15, 4), mode="bilinear", align_corners=True),
    }
    yield case("pool", layers, (2, 3, 11, 10))
    for name in ("max_ceil_padded", "avg_ceil_uncounted", "avg_counted", "up"):
        yield case(f"pool_{name}", layers[name], (2, 3, 11, 10))
    lines = {
        "max": nn.MaxPool1d(2),
        "max_padded": nn.MaxPool1d(3, 2, 1),
        "max_dilated": nn.MaxPool1d(3, 1, dilation=2),
        "max_ceil": nn.MaxPool1d(4, 3, 2, ceil_mode=True),
        "avg_ceil": nn.AvgPool1d(4, 3, 2, ceil_mode=True),
        "avg": nn.AvgPool1d(2),
        "avg_counted": nn.AvgPool1d(3, 2, 1),
        "avg_uncounted": nn.AvgPool1d(3, 2, 1, count_include_pad=False),
        "adaptive_1": nn.AdaptiveAvgPool1d(1),
        "adaptive_4": nn.AdaptiveAvgPool1d(4),
        "between": nn.Sequential(nn.Conv1d(3, 4, 3), nn.MaxPool1d(3), nn.Conv1d(4, 2, 1)),
    }
    yield case("pool1d", lines, (2, 3, 12))


def volumes() -> Iterator[Case]:
    layers = {
        "plain": nn.Conv3d(4, 6, 3),
        "padded": nn.Conv3d(4, 6, 3, padding=(1, 2, 0)),
        "stepped": nn.Conv3d(4, 6, 3, stride=(2, 1, 2), padding=1),
        "stepped_far": nn.Conv3d(4, 6, (2, 1, 1), stride=(3, 2, 1)),
        "dilated": nn.Conv3d(4, 6, (2, 3, 2), dilation=(3, 2, 1), padding=(1, 0, 0)),
        "point": nn.Conv3d(4, 6, 1, bias=False),
        "of_depth": nn.Conv3d(4, 6, (3, 1, 1), padding=(1, 0, 0)),
        "of_images": nn.Conv3d(4, 6, (1, 3, 3), padding=(0, 1, 1)),
        "deep": nn.Conv3d(4, 2, (7, 2, 2), padding=(3, 0, 0)),
        "grouped": nn.Conv3d(4, 6, 3, groups=2, padding=1),
        "depthwise": nn.Conv3d(4, 4, 3, groups=4, padding=1),
        "depthwise_wide": nn.Conv3d(4, 8, (3, 2, 2), groups=4, stride=2),
        "max": nn.MaxPool3d(2),
        "max_padded": nn.MaxPool3d(3, 2, 1),
        "max_of_depth": nn.MaxPool3d((3, 1, 1), 1),
        "max_of_images": nn.MaxPool3d((1, 2, 2)),
        "max_dilated": nn.MaxPool3d((2, 3, 2), 1, dilation=(3, 2, 1)),
        "max_ceil": nn.MaxPool3d((3, 2, 4), 2, 1, ceil_mode=True),
        "adaptive": nn.AdaptiveAvgPool3d(1),
        "norm": nn.Sequential(
            *(nn.Conv3d(4, 6, 3, padding=1), normed(6, nn.BatchNorm3d), nn.ReLU()),
            nn.MaxPool3d(2),
        ),
        "norm_apart": nn.Sequential(nn.MaxPool3d(2), normed(4, nn.BatchNorm3d)),
        "net": nn.Sequential(
            *(nn.Conv3d(4, 6, 3, padding=1), nn.ReLU6(), nn.MaxPool3d(2), nn.Conv3d(6, 3, 2)),
            *(nn.Flatten(), nn.Linear(12, 5)),
        ),
        "between": lambda x, m: (m(x.relu()) + 1).permute(0, 2, 1, 3, 4).sigmoid(),
    }
    parts = {"parts": (nn.Conv3d(4, 4, 3, padding=1),)}
    yield case("volume", layers, VOLUME, **parts)
    for name in ("stepped_far", "dilated", "depthwise_wide", "max_ceil", "net", "between"):
        yield case(f"volume_{name}", layers[name], VOLUME, **parts)


def norms() -> Iterator[Case]:
    conv = nn.Conv2d(3, 6, 3, padding=1)
    images = {
        "batch": normed(3),
        "batch_relu": nn.Sequential(normed(3), nn.ReLU()),
        "group": nn.GroupNorm(3, 3),
        "group_of_images": nn.Sequential(conv, nn.GroupNorm(1, 6), nn.Conv2d(6, 4, 1)),
        "group_after_conv": nn.Sequential(conv, nn.GroupNorm(3, 6)),
        "layer": nn.LayerNorm(5, eps=1e-6),
        "layer_2": nn.LayerNorm((4, 5)),
        "layer_plain": nn.LayerNorm(5, elementwise_affine=False),
        "rms": nn.RMSNorm(5, eps=1e-6),
        "rms_2": nn.RMSNorm((4, 5)),
    }
    yield case("image_norms", images, IMAGE)
    yield case("norm_of_lines", normed(3, nn.BatchNorm1d), (2, 3, 4))
    yield case("norm_of_rows", normed(3, nn.BatchNorm1d), (2, 3))
    yield case("norm_of_groups", nn.GroupNorm(2, 6), (2, 6, 4, 3))


def moves() -> Iterator[Case]:
    conv, same = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 3, 1)
    functions: dict[str, Any] = {
        "view": lambda x: x.view(6, -1),
        "reshape": lambda x: x.transpose(1, 2).reshape(2, -1),
        "unsqueeze": lambda x: x.unsqueeze(1),
        "squeeze": lambda x: x.unsqueeze(0).squeeze(),
        "permute": lambda x: x.permute(2, 0, 3, 1),
        "transpose": lambda x: x.transpose(-1, -3),
        "expand_same": lambda x: x.expand(2, 3, -1, -1),
        "expand": lambda x: x[:, :1].expand(2, 6, 4, 5),
        "expand_more": lambda x: x[0, :, 0, :1].expand(2, 3, 4),
        "clone": lambda x: x.clone().contiguous(),
        "dropout": lambda x: F.dropout(x, 0.5, training=False),
        "dropout_in_place": lambda x: F.dropout(x * 1, 0.5, False, True) + 1,
        "mT": lambda x: x.mT,
        "mH": lambda x: x.mH,
        "swapped": lambda x: x.swapdims(0, 3),
        "all": lambda x: x[0, 0].T,
        "slice": lambda x: x[:, 1:3, :, 2:],
        "slice_back": lambda x: x[:, -2:, :-1],
        "select": lambda x: x[:, 2] + x.select(1, -1),
        "split": lambda x: torch.cat(torch.split(x, 2, dim=1)[::-1], dim=1),
        "split_sizes": lambda x: torch.split(x, [1, 3], dim=2)[1],
        "chunk": lambda x: torch.mul(*x.chunk(2, dim=2)),
        "unbind": lambda x: x.unbind(2)[3],
        "pad": lambda x: F.pad(x, (1, 2, 0, 3), value=0.5),
        "pad_6": lambda x: F.pad(x, (1, 0, 0, 1, 2, 0)),
        "cat_6": lambda x: torch.cat([x, x + 1, x * 2, x - 1, x / 2, x.exp()], dim=-1),
        "cat_12": lambda x: torch.cat([x * n for n in range(1, 13)], 1),
        "stack": lambda x: torch.stack([x, x * 2], dim=1),
        "stack_last": lambda x: torch.stack([x, x * 2], dim=-1),
        "roll": lambda x: x.roll((2, -1), (2, 3)),
        "repeat": lambda x: x.repeat((2, 1, 3, 1)),
        "repeat_more": lambda x: x.repeat((2, 1, 1, 1, 2)),
        "repeat_one": lambda x: x.repeat((1, 1, 1, 1)),
        "tile": lambda x: x.tile(2, 3),
        "repeat_each": lambda x: x.repeat_interleave(3, 1),
        "expand_as": lambda x: x[:, :1].expand_as(x) * x,
        "as_other": lambda x: x.reshape_as(x.view(6, 20)) + x.view_as(x.view(6, 20)),
        "same_dtype": lambda x: x.to(torch.float32).type_as(x),
        "zeros_like": lambda x: x + torch.zeros_like(x) + x.new_ones(5),
        "every_second": lambda x: x[:, :, ::2, 1::2],
        "every_third": lambda x: x[:, :, 1::3, ::9],
        "nearest": lambda x: F.interpolate(x, scale_factor=2),
        "nearest_by_size": lambda x: F.interpolate(x, size=(20, 5)),
        "positions": lambda x: x * torch.arange(5.0).sin() + torch.arange(4)[:, None],
    }
    activated = {
        name: lambda x, *_, function=one: torch.relu(function(torch.relu(x)))
        for name, one in functions.items()
    }
    yield case("move", activated, IMAGE)
    # Behind a convolution, whose memory has channels last.
    convolved: dict[str, Any] = {
        name: lambda x, m, *_, function=one: function(m(x)[:, :3]).relu()
        for name, one in functions.items()
        if name not in ("as_other", "all", "view")
    }
    convolved |= {
        "flatten": lambda x, m, _: m(x).flatten(1),
        "softmax": lambda x, m, _: m(x).softmax(1),
        "add_split": lambda x, m, _: torch.add(*torch.split(m(x), 2, dim=1)),
        "roll_between": lambda x, _, m: m(m(x).roll((1, 9), (-2, 1))),
        "shuffle": lambda x, m, _: F.pixel_shuffle(m(x), 2),
        "channel_shuffle": lambda x, m, _: F.channel_shuffle(m(x), 2),
        "by_hand": lambda x, m, _: m(x).view(2, 2, 2, 4, 5).transpose(1, 2).reshape(2, 4, 4, 5),
        "cat": lambda x, m, _: torch.cat([m(x), x], dim=1),
    }
    yield case("move_after_conv", convolved, IMAGE, parts=(conv, same))
    yield case("flatten_one_pixel", lambda x, m: m(x).flatten(1), (2, 3, 1, 1), parts=(conv,))
    pixels = {
        "shuffle": lambda x: F.pixel_shuffle(x, 2).exp(),
        "channel_shuffle": lambda x: F.channel_shuffle(x, 4).exp(),
        "by_hand": lambda x: x.view(2, 2, 4, 6, 4).transpose(1, 2).reshape(x.shape).exp(),
    }
    yield case("pixel", pixels, (2, 8, 6, 4))


def choices() -> Iterator[Case]:
    conv = nn.Conv2d(3, 3, 1)
    functions: dict[str, Any] = {
        "flip": lambda x, m: torch.relu(x.flip((0, -1))),
        "flip_one": lambda x, m: m(m(x).flip(1)),
        "channels": lambda x, m: m(m(x)[:, torch.tensor([2, 0, 1])]),
    }
    for name, indices in {
        "one": [1],
        "turned": [3, 2, 1, 0],
        "halves": [2, 3, 0, 1],
        "many": [0, 1, 3, 3, 0, 2, 2, 3, 1, 0, 1, 2],
        "all": [0, 1, 2, 3],
    }.items():
        chosen = torch.tensor(indices)
        functions[f"select_{name}"] = lambda x, m, i=chosen: torch.relu(x.index_select(2, i))
        functions[f"index_{name}"] = lambda x, m, i=chosen: torch.relu(x[:, :, i - 4])
    yield case("choose", functions, IMAGE, parts=(conv,))
    for size in (7, 64, 100, 129):
        yield case(f"flip_{size}", lambda x: torch.relu(x.flip(1)), (2, size, 3))


def paddings() -> Iterator[Case]:
    """Yield paddings with elements of the tensor itself, few and many, of all ranks."""
    for shift in ((0, 0, 1, -1), (2, -3, -1, 1), (-1, -2)):
        yield case(f"pad_shift_{shift}", lambda x, a=shift: F.pad(x * 2, a) + 1, IMAGE)
    infinite = torch.randn(1, 2, 80)
    infinite[..., ::7] = torch.inf
    for mode in ("reflect", "replicate", "circular"):
        for name, shape, amounts in (
            ("line", LINE, (3, 2)),
            ("line_left", LINE, (1, 0)),
            ("image", IMAGE, (2, 1, 0, 3)),
            ("volume", (1, 2, 4, 5, 6), (1, 2, 3, 0, 1, 1)),
            ("many", (1, 2, 180), (157, 0)),
        ):

            def pad(x: Tensor, amounts: Any = amounts, mode: str = mode) -> Tensor:
                return torch.relu(F.pad(x * 2, amounts, mode=mode)) + 1

            yield case(f"pad_{mode}_{name}", pad, shape)
        conv = nn.Conv2d(3, 4, 3, padding=2, padding_mode=mode)
        yield case(f"pad_{mode}_conv", lambda x, m: m(m(x)[:, :3]), IMAGE, parts=(conv,))
        yield case(
            f"pad_{mode}_dynamic",
            lambda x, mode=mode: F.pad(x.abs(), (33, 20), mode=mode) * 2,
            (3, 2, 80),
            dynamic=(({0: Dim("batch", max=64)},),),
            others=((torch.randn(7, 2, 80),), (infinite,)),
        )


def reductions() -> Iterator[Case]:
    kinds = {
        **{name: getattr(torch, name) for name in ("mean", "sum", "amax", "amin", "var")},
        **{name: getattr(torch, name) for name in ("var_mean", "std_mean")},
        "std": lambda x, *args, **more: torch.std(x, *args, correction=0, **more),
        "norm": lambda x, dim, **more: torch.linalg.vector_norm(x, dim=dim, **more),
    }
    places = {"last": (-1,), "image": (2, 3), "channel": (1,), "rows": (1, 2), "apart": (0, 2)}
    for name, dims in places.items():
        functions: dict[str, Any] = {
            f"{kind}_{keep}": lambda x, f=one, d=dims, k=keep: f(x, d, keepdim=k)
            for kind, one in kinds.items()
            for keep in (False, True)
        }
        yield case(f"reduce_{name}", functions, IMAGE)
    whole: dict[str, Any] = {
        **{name: getattr(torch, name) for name in ("mean", "sum", "max", "min", "var")},
        "var_mean": torch.var_mean,
        "max_dim": lambda x: torch.max(x, 3)[0],
        "min_dim": lambda x: x.min(0, keepdim=True)[0],
        "var_mean_second": lambda x: torch.var_mean(x, 1)[1],
        "sum_rows": lambda x: x.sum((1, 2)) + x.mean((1, 2)),
    }
    yield case("reduce_all", whole, IMAGE)
    yield case("reduce_lines", lambda x: (x.mean((1, 2)), x.sum(-1, keepdim=True)), (2, 3, 4))
    yield case("std_biased", lambda x: torch.std(x + 100, 1, unbiased=False), IMAGE,
               tolerance=1e-4)  # fmt: skip
    yield case("var_between", lambda x, m: m(x).relu().var((2, 3)), IMAGE,
               parts=(nn.Conv2d(3, 4, 1),))  # fmt: skip


def composed() -> Iterator[Case]:
    scales = nn.Conv2d(3, 3, 1).requires_grad_(False)
    functions: dict[str, Any] = {
        **{f"softmax_{axis}": lambda x, _, a=axis: x.softmax(a) for axis in (0, 1, 2, -1)},
        "log_softmax": lambda x, _: F.log_softmax(60 * x, -1),
        "normalize": lambda x, _: F.normalize(x, dim=-1),
        "addcmul": lambda x, _: torch.addcmul(x, x.sin(), x.exp()),
        "addcmul_value": lambda x, _: torch.addcmul(x, x[0, 0, 0], x.exp(), value=-1.5),
        "addcmul_rows": lambda x, _: torch.addcmul(x, x[0, 0, :, :1], x[0, 0, 0], value=2).relu(),
        "addcmul_constants": lambda x, m: torch.addcmul(
            m.bias.view(3, 1, 1), m(x), m.bias.view(1, 3, 1, 1), value=3
        ),
    }
    yield case("compose", functions, IMAGE, parts=(scales,))
    rows = {"softmax": lambda x: x.softmax(0), "log_softmax": lambda x: F.log_softmax(x, 0)}
    yield case("compose_row", rows, (7,))


def outputs() -> Iterator[Case]:
    def read_inside(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.relu(x)
        return y, y + 0 * y, y.clone()

    yield case("output_twice", lambda x: (torch.relu(x), torch.relu(x) * 2), (2, 3))
    yield case("output_alias", lambda x: (torch.relu(x), torch.relu(x).view(3, 2)), (2, 3))
    yield case("output_read_inside", read_inside, (2, 3))
    weight = nn.Linear(3, 2).requires_grad_(False)
    yield case("constant_output", lambda x, m: (x + 1, m.weight * 2), (2, 3), parts=(weight,))
    yield case("unused_input", lambda x, y: torch.relu(x), (2, 3), (4,))


def layouts() -> Iterator[Case]:
    functions: dict[str, Any] = {
        "residual": lambda x, a, b: torch.relu(b(torch.relu(a(x))) + x),
        "scaled_channels": lambda x, a, b: b(a(x) * a(x).mean((2, 3), keepdim=True)),
        "row_of_numbers": lambda x, a, b: b(a(x) + x[0, 0, 0]),
        "linear_on_width": lambda x, a, b: F.linear(a(x), a.weight.flatten(1)[:, :5]),
        "gate": lambda x, a, b: b(a(x) * torch.sigmoid(F.adaptive_avg_pool2d(a(x), 1))),
        "matmul_after": lambda x, a, b: a(x).flatten(2) @ a(x).flatten(2).transpose(1, 2),
        "shuffle": lambda x, a, b: b(a(x).view(2, 2, 2, 6, 5).transpose(1, 2).flatten(1, 2)),
    }
    parts = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1)
    for name, one in functions.items():
        yield case(f"layout_{name}", one, (2, 3, 6, 5), parts=parts)
    # Inputs or outputs with channels last in the program.
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    image = torch.randn(2, 3, 6, 5).to(memory_format=torch.channels_last)
    both = {"flat": lambda x, m: m(x).flatten(1), "net": net, "sigmoid": lambda x, _: x.sigmoid()}
    yield case("channels_last", both, image, parts=(net,))
    yield case("channels_last_sigmoid", torch.sigmoid, image)
    yield case("permuted_output", lambda x: torch.relu(x).permute(0, 3, 1, 2), (2, 3, 4, 5))


class Recurrent(nn.Module):
    """A recurrent layer with all its results side by side."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layer = kind(5, 7, **options)

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        given = (states if len(states) > 1 else states[0],) if states else ()
        result, last = self.layer(x, *given)
        return (result, *(last if isinstance(last, tuple) else (last,)))


def recurrent() -> Iterator[Case]:
    forms: dict[str, dict[str, Any]] = {
        "batch_first": {"batch_first": True},
        "two_ways": {"bidirectional": True, "num_layers": 2},
        "no_bias": {"bias": False},
    }
    for kind in (nn.LSTM, nn.GRU):
        layers = {name: Recurrent(kind, **options) for name, options in forms.items()}
        yield case(f"recurrent_{kind.__name__}", layers, (4, 3, 5))
        states = (torch.randn(4, 3, 7),) * (1 + (kind is nn.LSTM))
        yield case(f"recurrent_{kind.__name__}_given", layers["two_ways"], (4, 3, 5), *states)
    batch = Dim("batch", min=1, max=9)
    yield case(
        *("recurrent_dynamic", Recurrent(nn.GRU, batch_first=True), (3, 4, 5), (1, 3, 7)),
        dynamic=(({0: batch}, {1: batch}),),
        others=((torch.randn(8, 4, 5), torch.randn(1, 8, 7)),),
    )


def dynamic() -> Iterator[Case]:
    def tokens(x: Tensor, layer: nn.Module) -> Tensor:
        y = layer(x).view(x.shape[0], 4, 2, 3).transpose(1, 2)
        return torch.softmax(y @ y.transpose(-1, -2), -1)[:, 1:]

    def merged_patches(x: Tensor, _: nn.Module) -> Tensor:
        return torch.cat([x.relu()[:, start::2, ::2] for start in (0, 1)], -1)

    cnn = nn.Sequential(
        *(nn.Conv2d(3, 4, 3), normed(4), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(4, 3)),
    )
    batch = Dim("batch", min=1, max=9)
    for name, function, shape in (
        ("mlp", nn.Sequential(nn.Flatten(), nn.Linear(90, 4), nn.ReLU()), (2, 3, 6, 5)),
        ("cnn", cnn, (2, 3, 6, 5)),
        ("tokens", tokens, (2, 4, 5)),
        ("patches", merged_patches, (2, 6, 7, 4)),
        ("lines", nn.Sequential(nn.MaxPool1d(2), nn.AvgPool1d(2)), LINE),
        ("volumes", nn.Sequential(nn.Conv3d(4, 3, 3, 2, 1), nn.MaxPool3d(2)), VOLUME),
    ):
        yield case(
            *(f"dynamic_{name}", function, shape),
            parts=(nn.Linear(5, 6),),
            dynamic=(({0: batch},),),
            others=tuple((torch.randn(size, *shape[1:]),) for size in (1, 8)),
        )
    side = Dim("side", min=4, max=16)
    yield case(
        *("dynamic_image", nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))),
        (1, 3, 8, 8),
        dynamic=(({2: side, 3: side},),),
        others=((torch.randn(1, 3, 16, 16),), (torch.randn(1, 3, 5, 5),)),
    )
    yield from two_sizes()
    yield from three_sizes()


def three_sizes() -> Iterator[Case]:
    """Yield lines and images of which all sizes vary but the channels."""

    def speech(x: Tensor, first: Any, second: Any, norm: Any, layer: Any, last: Any) -> Any:
        y = norm(second(norm(first(x)).relu()).transpose(1, 2).transpose(1, 2)).transpose(1, 2)
        y = layer(y)
        return y + last(y.transpose(1, 2))[:, :, :-1].transpose(1, 2)

    def image(x: Tensor, first: Any, layer: Any, norm: Any, last: Any) -> Any:
        y = first(x)
        tokens = norm(layer(y.flatten(2).transpose(1, 2)) * y.mean((2, 3))[:, None])
        return last(tokens.transpose(1, 2).reshape(y.shape))

    convolutions = (nn.Conv1d(3, 4, 3, 2), nn.Conv1d(4, 4, 2, bias=False))
    batch, length = Dim("batch", min=1, max=5), Dim("length", min=9, max=40)
    for groups in (1, 2, 4):
        norm = nn.GroupNorm(groups, 4)
        nn.init.uniform_(norm.weight)
        parts = (*convolutions, norm, nn.Linear(4, 4), nn.Conv1d(4, 4, 4, padding=2, groups=2))
        yield case(
            *(f"dynamic_speech_{groups}", speech, (2, 3, 20)),
            parts=parts,
            dynamic=(({0: batch, 2: length},),),
            others=((torch.randn(1, 3, 9),), (torch.randn(5, 3, 33),)),
        )
    height, width = Dim("height", min=6, max=16), Dim("width", min=6, max=16)
    yield case(
        *("dynamic_tokens_of_images", image, (2, 3, 8, 8)),
        parts=(nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv2d(4, 2, 3)),
        dynamic=(({0: batch, 2: height, 3: width},),),
        others=((torch.randn(1, 3, 6, 9),), (torch.randn(5, 3, 16, 7),)),
    )


def two_sizes() -> Iterator[Case]:
    """Yield views and attention of tensors with two varying sizes, as batch and tokens are."""

    def heads(x: Tensor, *sizes: int) -> Tensor:
        return x.relu().view(x.shape[0], x.shape[1], *sizes)

    def masked(x: Tensor, mask: Tensor, empty: Any, *, groups: int = 4) -> Any:
        query = heads(x, 4, 6).transpose(1, 2)
        key = heads(x[..., : groups * 6], groups, 6).transpose(1, 2)
        key = torch.cat([empty[0], key], -2)
        y = attend(query, key, key + 1, mask, enable_gqa=groups < 4)
        return y.transpose(1, 2).reshape(x.shape)

    views: dict[str, Any] = {
        "heads": lambda x: heads(x, 4, 6).exp(),
        "heads_in_front": lambda x: heads(x, 4, 6).transpose(1, 2) + 1,
        "heads_back": lambda x: heads(x, 4, 6).transpose(1, 2).relu().transpose(1, 2).flatten(2),
        "three": lambda x: heads(x, 2, 3, 4) * 2,
        "three_back": lambda x: (heads(x, 2, 3, 4) * 2).flatten(2) + 1,
        "other_heads": lambda x: heads(heads(x, 3, 8), 6, 4) + 1,
        "in_front": lambda x: (x.relu()[None] + 1).squeeze(0) * 2,
        "between": lambda x: (x.relu()[:, None] + 1).squeeze(1) * 2,
        "behind": lambda x: (x.relu()[..., None, None] + 1).squeeze((3, 4)) * 2,
        "beside": lambda x: torch.stack([x.relu(), x[:, :]], 1)[:, 1],
        "pieces": lambda x: sum(heads(x, 2, 12).unbind(2)),
        "first": lambda x: x.relu()[:, 0] * 2,
        "of_a_batch": lambda x: x.relu()[0] * 2,
        "of_a_line": lambda x: F.conv1d(x.mT, torch.ones(3, 24, 3), padding=1)[:, :, 0] * 2,
    }
    dims = {0: Dim("batch", min=1, max=5), 1: Dim("tokens", min=1, max=9)}
    others = ((1, 9, 24), (5, 1, 24), (4, 3, 24))
    yield case(
        *("dynamic_two_sizes", views, (2, 7, 24)),
        dynamic=((dims,),),
        others=tuple((torch.randn(shape),) for shape in others),
    )
    yield case(
        "dynamic_rows",
        lambda x, given: torch.addmm(given[0], x.view(-1, 24), given[1]).view(*x.shape[:2], 5) * 2,
        (2, 7, 24),
        parts=(nn.ParameterList([torch.randn(5), torch.randn(24, 5)]),),
        dynamic=((dims,),),
        others=tuple((torch.randn(shape),) for shape in others),
    )
    dims_of_mask = {0: dims[0], 2: dims[1], 3: dims[1]}
    kinds: Any = (
        ("truths", masked, lambda *shape: torch.rand(shape) > 0.6),
        ("floats", masked, lambda *shape: torch.where(torch.rand(shape) > 0.6, 1.0, -torch.inf)),
        ("groups", partial(masked, groups=2), lambda *shape: torch.rand(shape) > 0.6),
    )
    for name, function, mask in kinds:
        yield case(
            f"dynamic_masked_{name}",
            function,
            *((2, 7, 24), mask(2, 1, 7, 7)),
            parts=(nn.ParameterList([torch.zeros(0)]),),
            dynamic=((dims, dims_of_mask),),
            others=tuple(
                (torch.randn(shape), mask(shape[0], 1, shape[1], shape[1])) for shape in others
            ),
        )
