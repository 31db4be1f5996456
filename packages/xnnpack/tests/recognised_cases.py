"""Functions that authors write out in pieces, and functions that only look like an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lowerdeck_zoo import Of

HEADS, GROUPED, ROWS = (2, 4, 6, 8), (2, 2, 6, 8), (2, 9)
EPS = 1e-5


def _rms(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def _scaled_by(x: Tensor, number: Any) -> Tensor:
    return x * torch.rsqrt(number + EPS)


def _grouped(q: Tensor, k: Tensor, v: Tensor, axis: int = 2) -> Tensor:
    k, v = (x.unsqueeze(axis).expand(2, 2, 2, 6, 8).reshape(2, 4, 6, 8) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, axis: int = -1) -> Tensor:
    scores = q @ k.transpose(-1, -2) / 2.5
    return torch.softmax(scores if mask is None else scores + mask, axis) @ v


ATTENTION = "scaled_dot_product_attention"
WRITTEN_OUT: dict[str, tuple[Any, ...]] = {
    "relu6": ("hardswish", lambda x: x * F.relu6(x + 3) / 6, ROWS),
    "gate": ("hardswish", lambda x: x * (F.relu6(x + 3) / 6), ROWS),
    "clamped": ("hardsigmoid", lambda x: (x + 3).clamp(0, 6) / 6, ROWS),
    "rms": ("rms_norm", _rms, (2, 3, 5), (5,)),
    "rms_product": ("rms_norm", lambda x: _scaled_by(x, (x * x).mean((-1,), True)), (2, 3, 5)),
    "attention": (ATTENTION, _attend, HEADS, HEADS, HEADS),
    "groups": (ATTENTION, _grouped, HEADS, GROUPED, GROUPED),
}
"""The operator that is recognised, its pieces, and the sizes of inputs."""


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


def _views(x: Tensor, sizes: tuple[int, ...], order: tuple[int, ...], shape: Any) -> Tensor:
    return x.view(sizes).permute(order).reshape(shape)


_SHUFFLED = ((2, 2, 4, 3, 5), (1, 0, 2, 3, 4), (2, 8, 3, 5))
NEAR: dict[str, tuple[Any, ...]] = {
    "channels_of_images": ("channel_shuffle", lambda x: _views(x, *_SHUFFLED), (2, 8, 3, 5)),
    "another_number": ("hardswish", lambda x: x * F.relu6(x + 3) / 6.01, ROWS),
    "moved_otherwise": ("hardswish", lambda x: x * F.relu6(x + 2) / 6, ROWS),
    "of_another": ("hardswish", lambda x, y: y * F.relu6(x + 3) / 6, ROWS, ROWS),
    "with_alpha": ("hardswish", lambda x: x * F.relu6(torch.add(x, 3, alpha=2)) / 6, ROWS),
    "rounded": ("hardswish", lambda x: (x * F.relu6(x + 3)).div(6, rounding_mode="floor"), ROWS),
    "read_by_others": ("hardswish", _read_by_others, ROWS),
    "written_between": ("hardswish", _written_between, ROWS),
    "clamp_of_one_end": ("hardsigmoid", lambda x: (x + 3).clamp(min=0) / 6, ROWS),
    "eps_outside": ("rms_norm", lambda x: x * (x.pow(2).mean(-1, True).rsqrt() + EPS), (3, 5)),
    "another_axis": ("rms_norm", lambda x: _scaled_by(x, x.pow(2).mean(0, True)), (5, 5)),
    "two_axes": ("rms_norm", lambda x: _scaled_by(x, x.pow(2).mean((-1, -2), True)), (2, 5, 5)),
    "without_keepdim": ("rms_norm", lambda x: _scaled_by(x, x.pow(2).mean(-1)), (5, 5)),
    "cubes": ("rms_norm", lambda x: _scaled_by(x, x.pow(3).abs().mean(-1, True)), (3, 5)),
    "computed_eps": (
        *("rms_norm", lambda x, e: x * (x.pow(2).mean(-1, True) + e.abs()).rsqrt()),
        *((3, 5), (1,)),
    ),
    "no_eps": ("rms_norm", lambda x: x * torch.rsqrt(x.pow(2).mean(-1, True) + 0), (3, 5)),
    "norm_of_another": (
        *("rms_norm", lambda x, y: _scaled_by(y, x.pow(2).mean(-1, True)), (3, 5), (3, 5)),
    ),
    "attention_axis": (ATTENTION, lambda q, k, v: _attend(q, k, v, axis=-2), HEADS, HEADS, HEADS),
    "attention_scaled_by_a_tensor": (
        *(ATTENTION, lambda q, k, v, s: ((q @ k.mT) * s[:, None, None, None]).softmax(-1) @ v),
        *(HEADS, HEADS, HEADS, (2,)),
    ),
    "attention_not_turned": (
        *(ATTENTION, lambda q, k, v: torch.softmax(q @ k, -1) @ v),
        *((2, 4, 6, 6),) * 3,
    ),
    "attention_turned_otherwise": (
        *(ATTENTION, lambda q, k, v: torch.softmax(q @ k.transpose(-1, -3), -1) @ v),
        *((2, 4, 4, 4),) * 3,
    ),
    "attention_of_keys_that_broadcast": (ATTENTION, _attend, HEADS, (2, 1, 6, 8), HEADS),
    "attention_whose_weights_are_read": (ATTENTION, _scores_read, HEADS, HEADS, HEADS),
    "attention_with_a_computed_mask": (ATTENTION, _attend, HEADS, HEADS, HEADS, (6, 6)),
    "attention_with_a_mask_that_widens": (
        *(ATTENTION, lambda q, k, v: _attend(q, k, v, torch.ones(4, 6, 6))),
        *((1, 6, 8),) * 3,
    ),
    "slope_for_each_row": (
        *("_prelu_kernel", lambda x, w: torch.where(x > 0, x, w * x), (2, 3, 4), (1, 1, 4)),
    ),
    "slope_from_one_on": (
        *("_prelu_kernel", lambda x, w: torch.where(x > 1, x, w * x), (2, 3, 4), (1, 3, 1)),
    ),
    "product_of_other_rows": (
        *("matmul", lambda x, y: torch.mm(x.view(6, 4), y).view(3, 2, 5), (2, 3, 4), (4, 5)),
    ),
    "layer_of_other_rows": (
        *("linear", lambda x, y: torch.mm(x.view(6, 4), y.t()).view(2, 3, 4), (2, 4, 3), (4, 4)),
    ),
    "layer_that_is_not_turned": (
        *("linear", lambda x, y, b: torch.addmm(b, x.view(6, 4), y).view(2, 3, 4)),
        *((2, 3, 4), (4, 4), (4,)),
    ),
    "layer_with_a_factor": (
        *("linear", lambda x, y, b: torch.addmm(b, x.view(6, 4), y.t(), alpha=2).view(2, 3, 4)),
        *((2, 3, 4), (4, 4), (4,)),
    ),
    "product_of_other_batches": (
        *("matmul", lambda x, y: torch.bmm(x.view(6, 4, 5), y.view(6, 5, 4)).view(2, 3, 4, 4)),
        *((2, 3, 4, 5), (3, 2, 5, 4)),
    ),
    "heads_repeated_otherwise": (
        *("enable_gqa", lambda q, k, v: _grouped(q, k, v, 1), HEADS, GROUPED, GROUPED),
    ),
}
"""An operator that is not there, a function that looks like it, and the sizes of inputs."""


def with_weights(function: Callable[..., Any], weights: tuple[Tensor, ...]) -> Of:
    """Return a module that calls a function with its inputs, and with weights after them."""
    held = torch.nn.ParameterList(weights)
    return Of(lambda self, *inputs: function(*inputs, *self.weights), weights=held)


def model_of(
    function: Callable[..., Any], *shapes: tuple[int, ...]
) -> tuple[Of, tuple[Tensor, ...]]:
    """Return a model and its inputs; attention has three, all else one, the others are weights."""
    tensors = [torch.randn(shape) for shape in shapes]
    count = 3 if len(shapes) >= 3 and len(shapes[0]) == len(shapes[2]) > 1 else 1
    return with_weights(function, tuple(tensors[count:])).eval(), tuple(tensors[:count])
