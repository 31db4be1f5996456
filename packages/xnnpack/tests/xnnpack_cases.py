"""Small models, one for each thing that the XNNPACK backend can emit, with inputs for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from case_making import Case, Function, case, module  # type: ignore[import-not-found]
from further_cases import further  # type: ignore[import-not-found]
from mask_cases import given_masks, masks  # type: ignore[import-not-found]
from table_cases import tables  # type: ignore[import-not-found]
from tidied_cases import tidied  # type: ignore[import-not-found]
from torch import nn
from volume_cases import volumes  # type: ignore[import-not-found]

Tensor = torch.Tensor


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
            *(elementwise, slopes, arithmetic, convolutions, linear, pooling, normalization),
            *(
                shapes,
                pieces,
                reductions,
                attention,
                masks,
                given_masks,
                composed,
                outputs,
                rearranging,
                layouts,
                dynamic,
                memory_formats,
                further,
                volumes,
                tidied,
                tables,
            ),
        ):
            yield from group()


def elementwise() -> Iterator[Case]:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "abs": torch.abs,
        "ceil": torch.ceil,
        "cos": torch.cos,
        "exp": torch.exp,
        "floor": torch.floor,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "hardsigmoid": F.hardsigmoid,
        "hardswish": F.hardswish,
        "neg": torch.neg,
        "reciprocal": torch.reciprocal,
        "sigmoid": torch.sigmoid,
        "silu": F.silu,
        "sin": torch.sin,
        "square": torch.square,
        "tanh": torch.tanh,
        "relu": torch.relu,
        "relu6": F.relu6,
        "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.25),
        "clamp": lambda x: torch.clamp(x, -0.3, 0.7),
        "clamp_low": lambda x: torch.clamp(x, min=0.1),
        "clamp_high": lambda x: torch.clamp_max(x, 0.1),
        "clamp_crossed": lambda x: torch.clamp(x, 0.5, -0.5),
        "elu": lambda x: F.elu(x, alpha=0.7),
        "leaky_relu": lambda x: F.leaky_relu(x, 0.3),
        "pow1": lambda x: torch.pow(x, 1),
        "pow2": lambda x: torch.pow(x, 2),
        "pow3": lambda x: x**3,
    }
    for name, function in functions.items():
        yield case(name, function, (2, 3, 5))
    yield case("relu_of_nothing_but_a_number", torch.relu, ())
    yield case("sigmoid_6d", torch.sigmoid, (1, 2, 1, 3, 2, 2))
    for name, function in {
        "log": torch.log,
        "rsqrt": torch.rsqrt,
        "sqrt": torch.sqrt,
        "pow_half": lambda x: x**0.5,
        "pow_minus_half": lambda x: x**-0.5,
    }.items():
        yield Case(name, Function(function), (torch.rand(2, 9) + 0.01,))
    # A node without neighbours has degree 0.
    edges = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    for name, function in {
        "rsqrt_of_zero": lambda a: a.sum(1).rsqrt(),
        "pow_minus_half_of_zero": lambda a: a.sum(1) ** -0.5,
        "rms_norm": lambda a: a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6),
    }.items():
        yield Case(name, Function(function), (edges,))
    yield module("prelu", nn.PReLU(3, init=0.3), (2, 3, 4, 5))
    yield module("prelu_one", nn.PReLU(), (2, 3, 4, 5))
    yield module("prelu_2d", nn.PReLU(4), (3, 4))


def slopes() -> Iterator[Case]:
    """Yield a slope for each channel, and one for all, over each rank."""
    for shape in ((3, 4), (2, 3, 5), (2, 3, 4, 5), (2, 3, 2, 2, 3)):
        for count in (1, shape[1]):
            layer = nn.PReLU(count)
            nn.init.uniform_(layer.weight, -1.0, 1.0)
            yield module(f"prelu_{len(shape)}d_{count}", layer, shape)


def arithmetic() -> Iterator[Case]:
    pairs = {
        "same": ((2, 3, 4), (2, 3, 4)),
        "rows": ((2, 3, 4), (4,)),
        "outer": ((3, 1), (1, 5)),
        "channels": ((2, 3, 4, 5), (3, 1, 1)),
        "six": ((2, 1, 3, 1, 2, 2), (4, 1, 5, 1, 1)),
        "number": ((2, 3), ()),
    }
    for name, (left, right) in pairs.items():
        yield case(f"add_{name}", torch.add, left, right)
        yield case(f"sub_{name}", torch.sub, right, left)
    yield case("mul", torch.mul, (2, 3), (2, 3))
    yield case("div", lambda x, y: x / (y * y + 1), (2, 3), (2, 3))
    yield case("minimum", torch.minimum, (2, 3), (3,))
    yield case("maximum", torch.maximum, (2, 3), (2, 1))
    yield case("alpha", lambda x, y: torch.add(x, y, alpha=2.5), (2, 3), (3,))
    yield case("alpha_number", lambda x: torch.sub(x, 2.0, alpha=-3), (2, 3))
    yield case("rsub", lambda x: 1.5 - x, (2, 3))
    yield case("rsub_alpha", lambda x, y: torch.rsub(x, y, alpha=2), (2, 3), (3,))
    yield case("numbers", lambda x: (x * 2 + 1) / 4 - 0.125, (2, 3))
    yield case("divided_number", lambda x: 2 / (x * x + 1), (2, 3))
    for name, op in {"add": torch.add, "sub": torch.sub, "mul": torch.mul}.items():
        yield case(f"{name}_relu", lambda x, y, op=op: torch.relu(op(x, y)), (2, 3), (2, 3))
    yield case("div_clamp", lambda x: torch.clamp(x / 0.5, -1, 1), (4, 5))
    yield case("max_relu", lambda x, y: torch.relu(torch.maximum(x, y)), (2, 3), (2, 3))
    yield case("read_twice", lambda x, y: torch.relu(x + y) * (x + y), (2, 3), (2, 3))


def convolutions() -> Iterator[Case]:
    image = (2, 4, 9, 8)
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "no_bias": {"bias": False},
        "stride": {"stride": (2, 3)},
        "padding": {"padding": (1, 2)},
        "dilation": {"dilation": 2},
        "groups": {"groups": 2},
        "same": {"padding": "same", "kernel_size": 3},
        "same_dilated": {"padding": "same", "dilation": (1, 2)},
        "valid": {"padding": "valid"},
        # An even kernel: torch puts the odd row and the odd column at the end.
        "same_even": {"padding": "same", "kernel_size": (4, 2)},
        "same_even_dilated": {"padding": "same", "kernel_size": (2, 4), "dilation": (1, 3)},
        "same_one_axis": {"padding": "same", "kernel_size": (1, 4)},
    }
    for name, options in settings.items():
        kernel = options.pop("kernel_size", (3, 2))
        yield module(f"conv_{name}", nn.Conv2d(4, 6, kernel, **options), image)
    yield module("conv_1x1", nn.Conv2d(4, 6, 1), image)
    yield module("conv_one_channel", nn.Conv2d(1, 5, 3), (1, 1, 6, 6))
    yield module("conv_point", nn.Conv2d(1, 1, 1), (1, 1, 6, 6))
    yield module(
        "conv_point_relu", nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.ReLU()), (1, 1, 6, 6)
    )
    for shift in (-0.3, 0.3):
        point = nn.Conv2d(1, 1, 1)
        nn.init.constant_(point.weight, 2.0)
        nn.init.constant_(point.bias, shift)  # type: ignore[arg-type]  # it has a bias
        clamped = nn.Sequential(point, nn.Hardtanh(-0.5, 0.4))
        yield module(f"conv_point_bias_clamp_{shift}", clamped, (2, 1, 6, 6))
    yield module("depthwise", nn.Conv2d(4, 4, 3, padding=1, groups=4), image)
    yield module("depthwise_times_3", nn.Conv2d(4, 12, 3, stride=2, groups=4, bias=False), image)
    transposed: dict[str, dict[str, Any]] = {
        "transposed": {},
        "transposed_groups": {"groups": 2, "stride": 2, "padding": 1},
        "transposed_more": {"stride": 2, "output_padding": 1, "dilation": 2},
    }
    for name, options in transposed.items():
        yield module(name, nn.ConvTranspose2d(4, 6, 3, **options), image)
    for name, norm in {"bn": normed(6), "bn_plain": normed(6, affine=False)}.items():
        yield module(f"conv_{name}", nn.Sequential(nn.Conv2d(4, 6, 3), norm), image)
    yield module(
        "conv_bn_relu6",
        nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), normed(6), nn.ReLU6(inplace=True)),
        image,
    )
    yield module(
        "depthwise_bn_relu",
        nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), normed(8), nn.ReLU()),
        image,
    )
    yield module(
        "transposed_bn_relu",
        nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), normed(6), nn.ReLU()),
        image,
    )
    yield module("conv1d", nn.Conv1d(3, 5, 3, stride=2, padding=1), (2, 3, 11))
    yield module(
        "conv1d_chain",
        nn.Sequential(nn.Conv1d(3, 4, 3, groups=1), normed(4, nn.BatchNorm1d), nn.ReLU(),
                      nn.Conv1d(4, 4, 2, groups=4, dilation=2)),
        (2, 3, 11),
    )  # fmt: skip
    yield module("transposed_1d", nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (2, 4, 7))
    yield module("conv1d_same", nn.Conv1d(3, 5, 3, padding="same"), (2, 3, 11))


def linear() -> Iterator[Case]:
    layer = nn.Linear(5, 7)
    for rank in (1, 2, 3, 4):
        yield module(f"linear_{rank}d", layer, (2, 3, 4, 5)[-rank:])
    yield module("linear_no_bias", nn.Linear(5, 7, bias=False), (3, 5))
    yield module("linear_relu", nn.Sequential(nn.Linear(5, 7), nn.ReLU()), (3, 5))
    yield module(
        "linear_bn", nn.Sequential(nn.Linear(5, 7), normed(7, nn.BatchNorm1d), nn.ReLU()), (3, 5)
    )
    yield case("linear_runtime", F.linear, (3, 5), (7, 5), (7,))
    yield case("mm", torch.mm, (3, 5), (5, 7))
    yield case("bmm", torch.bmm, (2, 3, 5), (2, 5, 7))
    yield case("matmul", torch.matmul, (2, 1, 3, 5), (4, 5, 7))
    yield case("matmul_2d", torch.matmul, (2, 3, 5), (5, 7))
    weight = nn.Linear(7, 5).requires_grad_(False)
    yield case("matmul_constant", lambda x, m: x @ m.weight, (2, 3, 5), parts=(weight,))
    yield case("mm_transposed_constant", lambda x, m: x @ m.weight.t(), (3, 7), parts=(weight,))
    bias = nn.Linear(1, 7).requires_grad_(False)
    yield case(
        "addmm", lambda x, m, b: torch.addmm(b.bias, x, m.weight), (3, 5), parts=(weight, bias)
    )
    yield case("addmm_two_computed", torch.addmm, (7,), (3, 5), (5, 7))
    yield case("linear_constant_weight", lambda x, b, m: F.linear(x, m.weight, b), (3, 7), (5,),
               parts=(weight,))  # fmt: skip
    yield case("linear_constant_bias_relu", lambda x, w, b: F.relu(F.linear(x, w, b.bias)),
               (3, 5), (7, 5), parts=(bias,))  # fmt: skip
    yield module("embedding_like_k_513", nn.Linear(513, 4), (2, 513))


def pooling() -> Iterator[Case]:
    image = (2, 3, 11, 10)
    for name, options in {
        "plain": {"kernel_size": 2},
        "padded": {"kernel_size": 3, "stride": 2, "padding": 1},
        "dilated": {"kernel_size": (3, 2), "dilation": 2, "stride": 1},
        "ceil": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
        "ceil_padded": {"kernel_size": 4, "stride": 3, "padding": 2, "ceil_mode": True},
        "sparse": {"kernel_size": 1, "stride": 2},
    }.items():
        yield module(f"max_pool_{name}", nn.MaxPool2d(**options), image)  # type: ignore[arg-type]
    yield module("max_pool_relu", nn.Sequential(nn.MaxPool2d(2), nn.ReLU()), image)
    for name, options in {
        "plain": {"kernel_size": 2},
        "counted": {"kernel_size": 3, "padding": 1, "stride": 2},
        "uncounted": {"kernel_size": 3, "padding": 1, "count_include_pad": False},
        "divisor": {"kernel_size": 3, "divisor_override": 4, "padding": 1},
        "ceil": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
        "ceil_counted": {"kernel_size": 4, "stride": 3, "padding": 2, "ceil_mode": True},
        "ceil_uncounted": {"kernel_size": 4, "stride": 3, "padding": 1, "ceil_mode": True}
        | {"count_include_pad": False},
        "ceil_for_nothing": {"kernel_size": (1, 2), "ceil_mode": True, "divisor_override": 3},
    }.items():
        yield module(f"avg_pool_{name}", nn.AvgPool2d(**options), image)  # type: ignore[arg-type]
    yield module("adaptive_1", nn.AdaptiveAvgPool2d(1), image)
    yield module("adaptive_5_2", nn.AdaptiveAvgPool2d((5, 2)), (1, 3, 10, 6))
    for name, options in {
        "up": {"scale_factor": 2.0},
        "down": {"size": (5, 7)},
        "corners": {"size": (15, 4), "align_corners": True},
    }.items():
        yield case(
            f"resize_{name}",
            lambda x, options=options: F.interpolate(x, mode="bilinear", **options),
            image,
        )


def normalization() -> Iterator[Case]:
    yield module("batch_norm_alone", normed(3), (2, 3, 4, 5))
    yield module("batch_norm_alone_1d", normed(3, nn.BatchNorm1d), (2, 3, 4))
    yield module("batch_norm_alone_0d", normed(3, nn.BatchNorm1d), (2, 3))
    yield module("batch_norm_relu", nn.Sequential(normed(3), nn.ReLU()), (2, 3, 4, 5))
    yield module("layer_norm", nn.LayerNorm(8, eps=1e-6), (2, 3, 8))
    yield module("layer_norm_2", nn.LayerNorm((3, 8)), (2, 3, 8))
    yield module("rms_norm", nn.RMSNorm(8, eps=1e-6), (2, 3, 8))
    yield module("rms_norm_2", nn.RMSNorm((3, 8)), (2, 3, 8))
    yield module("layer_norm_plain", nn.LayerNorm(8, elementwise_affine=False), (4, 8))
    yield module("group_norm", nn.GroupNorm(2, 6), (2, 6, 4, 3))
    yield module(
        "group_norm_of_images",
        nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(1, 6), nn.Conv2d(6, 4, 1)),
        (2, 3, 7, 9),
    )
    yield module("group_norm_after_conv", nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6)),
                 (2, 3, 6, 5))  # fmt: skip


def shapes() -> Iterator[Case]:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "view": lambda x: torch.relu(x).view(6, -1),
        "reshape": lambda x: torch.relu(x).transpose(1, 2).reshape(2, -1),
        "flatten": lambda x: torch.relu(x).flatten(1),
        "unsqueeze": lambda x: torch.relu(x).unsqueeze(1),
        "squeeze": lambda x: torch.relu(x).unsqueeze(0).squeeze(),
        "permute": lambda x: torch.relu(x).permute(2, 0, 3, 1),
        "transpose": lambda x: torch.relu(x).transpose(-1, -3),
        "expand_same": lambda x: torch.relu(x).expand(2, 3, -1, -1),
        "expand": lambda x: torch.relu(x)[:, :1].expand(2, 6, 4, 5),
        "expand_more": lambda x: torch.relu(x)[0, :, 0, :1].expand(2, 3, 4),
        "clone": lambda x: torch.relu(x).clone().contiguous(),
        "dropout": lambda x: F.dropout(torch.relu(x), 0.5, training=False),
    }
    for name, function in functions.items():
        yield case(name, function, (2, 3, 4, 5))
    yield case("t", lambda x: torch.relu(x).t(), (2, 3))
    conv = nn.Conv2d(3, 4, 3)
    yield case(
        "permute_after_conv", lambda x, m: m(x).permute(0, 2, 3, 1), (2, 3, 6, 5), parts=(conv,)
    )
    yield case("flatten_after_conv", lambda x, m: m(x).flatten(1), (2, 3, 6, 5), parts=(conv,))
    yield case("flatten_one_pixel", lambda x, m: m(x).flatten(1), (2, 3, 3, 3), parts=(conv,))


def pieces() -> Iterator[Case]:
    functions: dict[str, Callable[[Tensor], Any]] = {
        "slice": lambda x: torch.relu(x)[:, 1:3, :, 2:],
        "slice_back": lambda x: torch.relu(x)[:, -2:, :-1],
        "select": lambda x: torch.relu(x)[:, 2] + torch.relu(x).select(1, -1),
        "split": lambda x: torch.cat(torch.split(torch.relu(x), 2, dim=1)[::-1], dim=1),
        "split_sizes": lambda x: torch.split(torch.relu(x), [1, 3], dim=1)[1],
        "chunk": lambda x: torch.mul(*torch.relu(x).chunk(2, dim=1)),
        "unbind": lambda x: torch.relu(x).unbind(1)[3],
        "pad": lambda x: F.pad(torch.relu(x), (1, 2, 0, 3), value=0.5),
        "pad_6": lambda x: F.pad(x, (1, 0, 0, 1, 2, 0)),
        "cat_6": lambda x: torch.cat([x, x + 1, x * 2, x - 1, x / 2, torch.relu(x)], dim=-1),
        "stack": lambda x: torch.stack([x, torch.relu(x)], dim=1),
        "stack_last": lambda x: torch.stack([x, torch.relu(x)], dim=-1),
        "cat_negative": lambda x: torch.cat([x, torch.relu(x)], dim=-3),
    }
    for name, function in functions.items():
        yield case(name, function, (2, 4, 3, 5))
    conv = nn.Conv2d(4, 6, 1)
    for name, chained in {
        "cat_after_conv": lambda x, m: torch.cat([m(x), x], dim=1),
        "slice_after_conv": lambda x, m: torch.relu(m(x)[:, 1:3, 1:]),
        "pad_after_conv": lambda x, m: F.pad(m(x), (1, 2, 3, 4, 0, 1)),
        "split_after_conv": lambda x, m: torch.add(*torch.split(m(x), 3, dim=1)),
        "select_after_conv": lambda x, m: m(x)[:, 1],
        "softmax_after_conv": lambda x, m: torch.softmax(m(x), 1),
    }.items():
        yield case(name, chained, (2, 4, 3, 5), parts=(conv,))


def reductions() -> Iterator[Case]:
    for name, dims in {"hw": (2, 3), "last": (-1,), "channel": (1,), "many": (0, 2)}.items():
        for keep in (False, True):
            yield case(
                f"mean_{name}_{keep}",
                lambda x, dims=dims, keep=keep: x.mean(dims, keepdim=keep),
                (2, 3, 4, 5),
            )
    yield case("mean_3d", lambda x: x.mean((1, 2)), (2, 3, 4))
    yield case("mean_all", lambda x: x.mean(), (2, 3, 4))
    yield case("sum_all", lambda x: x.sum(), (2, 3))
    for name, axes in {"hw": (2, 3), "w": (3,), "h": (2,)}.items():
        for keep in (False, True):
            yield case(
                f"amax_{name}_{keep}",
                lambda x, axes=axes, keep=keep: x.amax(axes, keepdim=keep),
                (2, 3, 4, 5),
            )
    yield case("max_dim", lambda x: torch.max(x, 3)[0], (2, 3, 4, 5))
    yield case("sum", lambda x: x.sum((1, 3)), (2, 3, 4, 5))
    yield case("sum_last", lambda x: x.sum(-1, keepdim=True), (2, 3, 4))


def attention() -> Iterator[Case]:
    for axis in (0, 1, 2, -1):
        yield case(f"softmax_{axis}", lambda x, axis=axis: torch.softmax(x, axis), (2, 3, 4, 5))
    yield case("softmax_1d", lambda x: torch.softmax(x, 0), (5,))
    heads = ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 7))
    yield case("attention", F.scaled_dot_product_attention, *heads)
    yield case(
        "attention_causal",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        *((2, 5, 4), (2, 6, 4), (2, 6, 7)),
    )


def composed() -> Iterator[Case]:
    image = (2, 3, 4, 5)
    scales = nn.Conv2d(3, 3, 1).requires_grad_(False)
    yield case("addcmul", torch.addcmul, image, image, image)
    yield case(
        "addcmul_value", lambda x, y, z: torch.addcmul(x, y, z, value=-1.5), image, (5,), image
    )
    yield case(
        "addcmul_rows",
        lambda x, y, z: torch.relu(torch.addcmul(x, y, z, value=2)),
        image,
        (4, 1),
        (5,),
    )
    yield case(
        "addcmul_constants",
        lambda x, m: torch.addcmul(m.bias.view(3, 1, 1), m(x), m.bias.view(1, 3, 1, 1), value=3),
        *(image,),
        parts=(scales,),
    )
    yield case("log_softmax", lambda x: F.log_softmax(60 * x, -1), image)
    yield case("log_softmax_1d", lambda x: F.log_softmax(x, 0), (7,))
    yield case("roll", lambda x: torch.relu(x.roll((2, -1), (2, 3))), image)
    yield case("roll_images", lambda x, m: m(m(x).roll((1, 9), (-2, 1))), image, parts=(scales,))
    for step, first in ((2, 0), (2, 1), (3, 1), (9, 0)):
        yield case(
            f"every_{step}_from_{first}",
            lambda x, step=step, first=first: torch.relu(x[:, :, first::step, ::2]),
            (2, 3, 7, 5),
        )
    yield case("as_other", lambda x, y: torch.relu(x).reshape_as(y) + y.view_as(y), (2, 6), (3, 4))
    yield case("expand_as", lambda x, y: torch.relu(x).expand_as(y) * y, (1, 6), (3, 6))
    yield case("same_dtype", lambda x: torch.relu(x).to(torch.float32).type_as(x), image)
    yield case("zeros_like", lambda x: torch.relu(x) + torch.zeros_like(x) + x.new_ones(5), image)
    yield case("as_strided", lambda x: torch.relu(torch.as_strided(x * 2, (3, 2), (2, 1))), (2, 3))
    yield case("dropout_in_place", lambda x: F.dropout(torch.relu(x), 0.5, False, True) + 1, image)
    yield case(
        "positions", lambda x: x * torch.arange(5).float().sin() + torch.arange(4)[:, None], image
    )
    for name, dims, keep in (("rows", (1, 2), True), ("last", -1, True), ("image", (2, 3), False)):
        yield case(
            f"vector_norm_{name}",
            lambda x, dims=dims, keep=keep: torch.linalg.vector_norm(x, dim=dims, keepdim=keep),
            image,
        )
    yield case("normalize", lambda x: F.normalize(x, dim=-1), image)
    yield case("sum_rows", lambda x: x.sum((1, 2)) + x.mean((1, 2)), image)


def outputs() -> Iterator[Case]:
    yield case("two", lambda x: (torch.relu(x), x + 1), (2, 3))
    yield case("twice", lambda x: (torch.relu(x), torch.relu(x) * 2), (2, 3))
    yield case("alias", lambda x: (torch.relu(x), torch.relu(x).view(3, 2)), (2, 3))

    def same(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x)
        return y, y + 0 * y

    yield case("output_read_inside", same, (2, 3))

    def views(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x)
        return y, y.clone()

    yield case("one_value_two_outputs", views, (2, 3))
    weight = nn.Linear(3, 2).requires_grad_(False)
    yield case("constant_output", lambda x, m: (x + 1, m.weight * 2), (2, 3), parts=(weight,))
    yield case("unused_input", lambda x, y: torch.relu(x), (2, 3), (4,))


def rearranging() -> Iterator[Case]:
    """Yield what moves or repeats pixels, in either order of memory."""
    conv = nn.Conv2d(3, 8, 3, padding=1)
    parts: dict[str, Callable[[Tensor], Tensor]] = {
        "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
        "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
        "channel_shuffle": lambda x: F.channel_shuffle(x, 4),
        "nearest": lambda x: F.interpolate(x, scale_factor=2),
        "nearest_by_size": lambda x: F.interpolate(x, size=(30, 4)),
        "shuffled_by_hand": lambda x: (
            x.view(2, 2, 4, *x.shape[2:]).transpose(1, 2).reshape(x.shape)
        ),
    }
    for name, part in parts.items():
        yield case(name, lambda x, part=part: torch.relu(part(x)), (2, 8, 6, 4))
        yield case(
            f"{name}_of_a_convolution",
            lambda x, m, part=part: torch.relu(part(m(x))),
            (2, 3, 6, 4),
            parts=(conv,),
        )


def layouts() -> Iterator[Case]:
    conv = nn.Conv2d(3, 4, 3, padding=1)
    other = nn.Conv2d(4, 3, 1)
    for name, function in {
        "residual": lambda x, a, b: torch.relu(b(torch.relu(a(x))) + x),
        "scaled_channels": lambda x, a, b: b(a(x) * a(x).mean((2, 3), keepdim=True)),
        "row_of_numbers": lambda x, a, b: b(a(x) + x[0, 0, 0]),
        "linear_on_width": lambda x, a, b: F.linear(a(x), a.weight.flatten(1)[:, :5]),
        "gate": lambda x, a, b: b(a(x) * torch.sigmoid(F.adaptive_avg_pool2d(a(x), 1))),
        "matmul_after": lambda x, a, b: a(x).flatten(2) @ a(x).flatten(2).transpose(1, 2),
        "shuffle": lambda x, a, b: b(a(x).view(2, 2, 2, 6, 5).transpose(1, 2).reshape(2, 4, 6, 5)),
    }.items():
        yield case(name, function, (2, 3, 6, 5), parts=(conv, other))


def dynamic() -> Iterator[Case]:
    batch = torch.export.Dim("batch", min=1, max=8)

    def others(*shape: int) -> tuple[tuple[Tensor, ...], ...]:
        return tuple((torch.randn(size, *shape),) for size in (1, 8))

    image = (3, 6, 5)
    for name, net in {
        "mlp": nn.Sequential(nn.Flatten(), nn.Linear(90, 4), nn.ReLU(), nn.Linear(4, 3)),
        "cnn": nn.Sequential(
            *(nn.Conv2d(3, 4, 3), normed(4), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(4, 3)),
        ),
    }.items():
        yield module(
            f"dynamic_{name}", net, (2, *image), dynamic=(({0: batch},),), others=others(*image)
        )

    def tokens(x: Tensor, layer: nn.Module) -> Tensor:
        y = layer(x).view(x.shape[0], 4, 2, 3).transpose(1, 2)
        return torch.softmax(y @ y.transpose(-1, -2), -1)[:, 1:]

    yield case(
        *("dynamic_tokens", tokens, (2, 4, 5)),
        parts=(nn.Linear(5, 6),),
        dynamic=(({0: batch},),),
        others=others(4, 5),
    )
    side = torch.export.Dim("side", min=4, max=16)
    yield module(
        *("dynamic_image", nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))),
        (1, 3, 8, 8),
        dynamic=(({2: side, 3: side},),),
        others=((torch.randn(1, 3, 16, 16),), (torch.randn(1, 3, 5, 5),)),
    )


def memory_formats() -> Iterator[Case]:
    """Yield cases whose inputs or outputs lie with channels last in the program."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    image = torch.randn(2, 3, 6, 5).to(memory_format=torch.channels_last)
    yield Case("input_with_channels_last", Function(lambda x, m: m(x).flatten(1), net), (image,))
    yield Case("both_with_channels_last", Function(lambda x, m: m(x), net), (image,))
    yield Case("elementwise_with_channels_last", Function(torch.sigmoid), (image,))
    yield case("permuted_output", lambda x: torch.relu(x).permute(0, 3, 1, 2), (2, 3, 4, 5))
