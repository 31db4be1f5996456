"""Functions that come apart when they are decomposed, and functions that only look like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
Case: TypeAlias = tuple[Callable[..., Any], Shapes]
HEADS = (2, 4, 6, 8)
KEPT = torch.ones(6, 6).tril().bool()
NOTHING_IN_A_ROW = KEPT & (torch.arange(6) != 2)[:, None]
attend = F.scaled_dot_product_attention


def _rms(x: Tensor, w: Tensor, eps: float = 1e-5) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / 2.5, -1) @ v


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :, None].expand(2, 2, 2, 6, 8).reshape(2, 4, 6, 8) for x in (k, v))
    return attend(q, k, v)


WHOLE: dict[str, Case] = {
    "silu": (F.silu, ((2, 3, 5),)),
    **{
        f"linear_{len(shape)}d{'' if bias else '_no_bias'}": (
            F.linear,
            (shape, (7, 5), (7,))[: 2 + bias],
        )
        for shape in ((5,), (3, 5), (2, 3, 5), (2, 1, 3, 5))
        for bias in ((True, False) if len(shape) > 1 else (True,))
    },
    "linear_of_what_lies_otherwise": (
        lambda x, w, b: F.linear(x.transpose(0, 1), w, b),
        ((4, 3, 5), (7, 5), (7,)),
    ),
    "matmul_3d_by_2d": (torch.matmul, ((2, 3, 5), (5, 7))),
    "matmul_4d": (torch.matmul, ((2, 4, 3, 5), (2, 4, 5, 7))),
    "matmul_of_batches_that_broadcast": (torch.matmul, ((2, 1, 3, 5), (4, 5, 7))),
    "hardswish": (lambda x: F.hardswish(4 * x), ((2, 3, 5),)),
    "hardsigmoid": (lambda x: F.hardsigmoid(4 * x), ((2, 3, 5),)),
    "celu": (lambda x: F.celu(4 * x, 0.6), ((2, 3, 5),)),
    "softplus": (lambda x: F.softplus(30 * x), ((2, 3, 5),)),
    "mish": (lambda x: F.mish(30 * x), ((2, 3, 5),)),
    "glu": (F.glu, ((2, 3, 6),)),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), ((2, 3, 6),)),
    "repeat_interleave": (lambda x: torch.relu(x.repeat_interleave(2, 1)), ((2, 3, 6),)),
    "std": (lambda x: x.std(-1), ((2, 3, 6),)),
    "roll": (lambda x: torch.relu(x.roll((2, -1), (1, 2))), ((2, 5, 4),)),
    "pixel_shuffle": (lambda x: torch.relu(F.pixel_shuffle(x, 2)), ((2, 8, 3, 5),)),
    "pixel_unshuffle": (lambda x: torch.relu(F.pixel_unshuffle(x, 2)), ((2, 3, 4, 6),)),
    "channel_shuffle": (lambda x: torch.relu(F.channel_shuffle(x, 2)), ((2, 8, 3, 5),)),
    "prelu": (F.prelu, ((2, 3, 4, 5), (3,))),
    "prelu_one": (F.prelu, ((2, 3, 4), (1,))),
    "rms_norm": (lambda x, w: F.rms_norm(x, [5], w, 1e-5), ((2, 3, 5), (5,))),
    "rms_norm_alone": (lambda x: F.rms_norm(x, [5], eps=1e-5), ((3, 5),)),
    "attention": (attend, (HEADS, HEADS, HEADS)),
    "attention_3d": (attend, (HEADS[1:],) * 3),
    "attention_of_other_lengths": (attend, (HEADS, (2, 4, 5, 8), (2, 4, 5, 3))),
    "attention_scaled": (lambda q, k, v: attend(q, k, v, scale=0.3), (HEADS, HEADS, HEADS)),
    "attention_causal": (lambda q, k, v: attend(q, k, v, is_causal=True), (HEADS,) * 3),
    "attention_masked": (lambda q, k, v: attend(q, k, v, KEPT), (HEADS,) * 3),
    "attention_of_nothing_in_a_row": (
        lambda q, k, v: attend(q, k, v, NOTHING_IN_A_ROW),
        (HEADS,) * 3,
    ),
    "attention_of_groups": (
        lambda q, k, v: attend(q, k, v, enable_gqa=True),
        (HEADS, (2, 2, 6, 8), (2, 2, 6, 8)),
    ),
    "attention_between_layers": (
        lambda x, w: F.linear(
            attend(*(F.linear(x, w).view(2, 6, 4, 2).transpose(1, 2),) * 3)
            .transpose(1, 2)
            .reshape(2, 6, 8),
            w,
        ),
        ((2, 6, 8), (8, 8)),
    ),
}
"""Each is compiled to the same nodes whether or not it was decomposed."""
WRITTEN_OUT: dict[str, tuple[str, *Case]] = {
    "relu6": ("hardswish", lambda x: x * F.relu6(x + 3) / 6, ((2, 9),)),
    "gate": ("hardswish", lambda x: x * (F.relu6(x + 3) / 6), ((2, 9),)),
    "clamped": ("hardsigmoid", lambda x: (x + 3).clamp(0, 6) / 6, ((2, 9),)),
    "rms": ("rms_norm", _rms, ((2, 3, 5), (5,))),
    "rms_product": (
        "rms_norm",
        lambda x: torch.rsqrt((x * x).mean((-1,), True) + 1e-6) * x,
        ((2, 3, 5),),
    ),
    "attention": ("scaled_dot_product_attention", _eager, (HEADS,) * 3),
    "groups": (
        "scaled_dot_product_attention",
        _grouped,
        (HEADS, (2, 2, 6, 8), (2, 2, 6, 8)),
    ),
}
"""What authors of models write themselves: the operator that is recognised, and its pieces."""


def _read_by_others(x: Tensor) -> Tensor:
    six = F.relu6(x + 3)
    return x * six / 6 + six


def _written_between(x: Tensor) -> Tensor:
    y = x * 1
    six = F.relu6(y + 3)
    y.add_(1)
    return y * six / 6


def _scores_read(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(q @ k.transpose(-1, -2), -1)
    return weights @ v, weights


NEAR: dict[str, tuple[str, *Case]] = {
    "gate_of_another": ("silu", lambda x, y: x * torch.sigmoid(y), ((2, 9),) * 2),
    "rows_chosen_otherwise": (
        "roll",
        lambda x: torch.relu(x.index_select(1, (torch.arange(5) + 2).fmod(4))),
        ((2, 5, 4),),
    ),
    "fewer_rows": (
        "roll",
        lambda x: torch.relu(x.index_select(1, (torch.arange(4) + 2).fmod(5))),
        ((2, 5, 4),),
    ),
    "pixels_in_another_order": (
        "pixel_shuffle",
        lambda x: x.view(2, 2, 2, 2, 3, 5).permute(0, 3, 4, 1, 5, 2).reshape(2, 2, 6, 10),
        ((2, 8, 3, 5),),
    ),
    "channels_of_pixels": (
        "pixel_unshuffle",
        lambda x: x.view(2, 3, 2, 2, 3, 2).permute(0, 1, 3, 5, 2, 4).reshape(2, 12, 3, 2),
        ((2, 3, 4, 6),),
    ),
    "channels_of_images": (
        "channel_shuffle",
        lambda x: x.view(2, 2, 4, 3, 5).transpose(0, 1).reshape(2, 8, 3, 5),
        ((2, 8, 3, 5),),
    ),
    "hardswish_by_another_number": ("hardswish", lambda x: x * F.relu6(x + 3) / 6.01, ((2, 9),)),
    "hardswish_moved_otherwise": ("hardswish", lambda x: x * F.relu6(x + 2) / 6, ((2, 9),)),
    "hardswish_of_another": ("hardswish", lambda x, y: y * F.relu6(x + 3) / 6, ((2, 9),) * 2),
    "hardswish_with_an_alpha": (
        "hardswish",
        lambda x: x * F.relu6(torch.add(x, 3, alpha=2)) / 6,
        ((2, 9),),
    ),
    "hardswish_rounded": (
        "hardswish",
        lambda x: torch.div(x * F.relu6(x + 3), 6, rounding_mode="floor"),
        ((2, 9),),
    ),
    "hardswish_read_by_others": ("hardswish", _read_by_others, ((2, 9),)),
    "hardswish_written_between": ("hardswish", _written_between, ((2, 9),)),
    "clamp_of_one_end": ("hardsigmoid", lambda x: (x + 3).clamp(min=0) / 6, ((2, 9),)),
    "norm_with_eps_outside": (
        "rms_norm",
        lambda x: x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-5),
        ((3, 5),),
    ),
    "norm_over_another_axis": (
        "rms_norm",
        lambda x: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5),
        ((5, 5),),
    ),
    "norm_over_two_axes": (
        "rms_norm",
        lambda x: x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + 1e-5),
        ((2, 5, 5),),
    ),
    "norm_without_keepdim": (
        "rms_norm",
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1) + 1e-5),
        ((5, 5),),
    ),
    "norm_of_cubes": (
        "rms_norm",
        lambda x: x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + 1e-5),
        ((3, 5),),
    ),
    "norm_with_an_eps_of_its_own": (
        "rms_norm",
        lambda x, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps.abs()),
        ((3, 5), (1,)),
    ),
    "norm_without_eps": (
        "rms_norm",
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0),
        ((3, 5),),
    ),
    "norm_of_another": (
        "rms_norm",
        lambda x, y: y * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
        ((3, 5),) * 2,
    ),
    "attention_over_another_axis": (
        "scaled_dot_product_attention",
        lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -2) @ v,
        (HEADS,) * 3,
    ),
    "attention_with_a_scale_that_is_a_tensor": (
        "scaled_dot_product_attention",
        lambda q, k, v, s: torch.softmax(q @ k.transpose(-1, -2) * s[:, None, None, None], -1) @ v,
        (HEADS, HEADS, HEADS, (2,)),
    ),
    "attention_without_turning": (
        "scaled_dot_product_attention",
        lambda q, k, v: torch.softmax(q @ k, -1) @ v,
        ((2, 4, 6, 6),) * 3,
    ),
    "attention_turned_otherwise": (
        "scaled_dot_product_attention",
        lambda q, k, v: torch.softmax(q @ k.transpose(-1, -3), -1) @ v,
        ((2, 4, 4, 4),) * 3,
    ),
    "attention_of_keys_that_broadcast": (
        "scaled_dot_product_attention",
        lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1) @ v,
        (HEADS, (2, 1, 6, 8), HEADS),
    ),
    "attention_whose_weights_are_read": (
        "scaled_dot_product_attention",
        _scores_read,
        (HEADS,) * 3,
    ),
    "attention_with_a_computed_mask": (
        "scaled_dot_product_attention",
        lambda q, k, v, m: torch.softmax(q @ k.transpose(-1, -2) + m, -1) @ v,
        (HEADS, HEADS, HEADS, (6, 6)),
    ),
    "attention_with_a_mask_that_widens": (
        "scaled_dot_product_attention",
        lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) + torch.ones(4, 6, 6), -1) @ v,
        ((1, 6, 8),) * 3,
    ),
    "celu_of_two_numbers": (
        "celu",
        lambda x: torch.where(x > 0, x, torch.expm1(x / 0.6) * 0.7),
        ((2, 9),),
    ),
    "softplus_of_another": (
        "softplus",
        lambda x, y: torch.where(x > 20, x, y.exp().log1p()),
        ((2, 9),) * 2,
    ),
    "slope_for_each_row": (
        "_prelu_kernel",
        lambda x, w: torch.where(x > 0, x, w * x),
        ((2, 3, 4), (1, 1, 4)),
    ),
    "slope_from_one_on": (
        "_prelu_kernel",
        lambda x, w: torch.where(x > 1, x, w * x),
        ((2, 3, 4), (1, 3, 1)),
    ),
    "product_of_other_rows": (
        "matmul",
        lambda x, y: torch.mm(x.view(6, 4), y).view(3, 2, 5),
        ((2, 3, 4), (4, 5)),
    ),
    "layer_of_other_rows": (
        "linear",
        lambda x, y: torch.mm(x.view(6, 4), y.t()).view(2, 3, 4),
        ((2, 4, 3), (4, 4)),
    ),
    "layer_that_is_not_turned": (
        "linear",
        lambda x, y, b: torch.addmm(b, x.view(6, 4), y).view(2, 3, 4),
        ((2, 3, 4), (4, 4), (4,)),
    ),
    "layer_with_a_factor": (
        "linear",
        lambda x, y, b: torch.addmm(b, x.view(6, 4), y.t(), alpha=2).view(2, 3, 4),
        ((2, 3, 4), (4, 4), (4,)),
    ),
    "product_of_other_batches": (
        "matmul",
        lambda x, y: torch.bmm(x.view(6, 4, 5), y.view(6, 5, 4)).view(2, 3, 4, 4),
        ((2, 3, 4, 5), (3, 2, 5, 4)),
    ),
    "heads_repeated_otherwise": (
        "enable_gqa",
        lambda q, k, v: attend(
            q, *(x[:, None].expand(2, 2, 2, 6, 8).reshape(2, 4, 6, 8) for x in (k, v))
        ),
        (HEADS, (2, 2, 6, 8), (2, 2, 6, 8)),
    ),
}
"""An operator that is not there, and a function that looks like it."""


class Constants(torch.nn.Module):
    """Calls a function with its first input, or its first few, and with weights for the others.

    Args:
        function: The function.
        weights: What it takes after its inputs.
    """

    def __init__(self, function: Callable[..., Any], weights: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = torch.nn.ParameterList(weights)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs, *self.weights)


def model_of(function: Callable[..., Any], shapes: Shapes) -> tuple[Constants, tuple[Tensor, ...]]:
    """Return a model and its inputs; attention has three, all else one, the others are weights."""
    tensors = [torch.randn(shape) for shape in shapes]
    count = 3 if len(shapes) >= 3 and len(shapes[0]) == len(shapes[2]) > 1 else 1
    return Constants(function, tuple(tensors[count:])).eval(), tuple(tensors[:count])
