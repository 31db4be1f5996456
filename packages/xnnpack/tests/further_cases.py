"""More operators: pools over lines, gates, deviations, extremes, repetitions, choices, loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from case_making import Case, case, module  # type: ignore[import-not-found]
from torch import nn
from torch.export import Dim

IMAGE = (2, 3, 4, 5)


def further() -> Iterator[Case]:
    """Yield the cases."""
    for group in (lines, gates, deviations, extremes, repetitions, turns, choices, recurrent):
        yield from group()


def lines() -> Iterator[Case]:
    line = (2, 3, 11)
    for name, layer in {
        "max": nn.MaxPool1d(2),
        "max_padded": nn.MaxPool1d(3, 2, 1),
        "max_dilated": nn.MaxPool1d(3, 1, dilation=2),
        "max_ceil": nn.MaxPool1d(4, 3, 2, ceil_mode=True),
        "avg_ceil": nn.AvgPool1d(4, 3, 2, ceil_mode=True),
        "avg": nn.AvgPool1d(2),
        "avg_counted": nn.AvgPool1d(3, 2, 1),
        "avg_uncounted": nn.AvgPool1d(3, 2, 1, count_include_pad=False),
        "adaptive_1": nn.AdaptiveAvgPool1d(1),
        "between": nn.Sequential(nn.Conv1d(3, 4, 3), nn.MaxPool1d(3), nn.Conv1d(4, 2, 1)),
    }.items():
        yield module(f"line_{name}", layer, line)
    yield module("line_adaptive", nn.AdaptiveAvgPool1d(4), (2, 3, 12))
    batch = Dim("batch", min=1, max=9)
    yield module(
        "line_dynamic",
        nn.Sequential(nn.MaxPool1d(2), nn.AvgPool1d(2)),
        line,
        dynamic=(({0: batch},),),
        others=((torch.randn(5, 3, 11),), (torch.randn(1, 3, 11),)),
    )


def gates() -> Iterator[Case]:
    for axis in (1, -1):
        yield case(f"glu_{axis}", lambda x, axis=axis: F.glu(x, axis), (2, 6, 3, 4))
    yield module("glu_between", nn.Sequential(nn.Conv2d(3, 8, 3), nn.GLU(1)), (1, 3, 6, 7))
    yield case("selu", lambda x: F.selu(3 * x), IMAGE)
    yield case("celu", lambda x: F.celu(3 * x, 0.6), IMAGE)
    yield case("elu_scaled", lambda x: torch.ops.aten.elu(3 * x, 0.7, 1.3, 0.4), IMAGE)
    yield case("softplus", lambda x: F.softplus(10 * x), IMAGE)
    yield case("softplus_scaled", lambda x: F.softplus(10 * x, 0.7, 30), IMAGE)
    yield case("mish", lambda x: F.mish(20 * x), IMAGE)


def deviations() -> Iterator[Case]:
    for name, dims, keep in (
        *(("last", (-1,), True), ("image", (2, 3), True), ("image_flat", (2, 3), False)),
        *(("channel", (1,), False), ("rows", (1, 2), True)),
    ):
        yield case(f"var_{name}", lambda x, d=dims, k=keep: torch.var(x, d, keepdim=k), IMAGE)
        yield case(
            f"std_{name}",
            lambda x, d=dims, k=keep: torch.std(x, d, correction=0, keepdim=k),
            IMAGE,
        )
        for both in (torch.var_mean, torch.std_mean):
            yield case(
                f"{both.__name__}_{name}",
                lambda x, f=both, d=dims, k=keep: f(x, d, keepdim=k),
                IMAGE,
            )
    yield case("var_mean_all", torch.var_mean, IMAGE)
    yield case("var_mean_second", lambda x: torch.var_mean(x, 1)[1], IMAGE)
    yield case("var_all", torch.var, IMAGE)
    yield case(
        "std_biased", lambda x: torch.std(x + 100, 1, unbiased=False), IMAGE, tolerance=1e-4
    )
    yield case(
        "var_between",
        lambda x, m: torch.relu(m(x)).var((2, 3)),
        IMAGE,
        parts=(nn.Conv2d(3, 4, 1),),
    )


def extremes() -> Iterator[Case]:
    for name, dims in {"last": (-1,), "channel": (1,), "many": (0, 2), "image": (2, 3)}.items():
        for keep in (False, True):
            for kind in ("amax", "amin"):
                yield case(
                    f"{kind}_of_{name}_{keep}",
                    lambda x, d=dims, k=keep, f=kind: getattr(x, f)(d, keepdim=k),
                    IMAGE,
                )
    yield case("max_all", lambda x: torch.relu(x).max(), IMAGE)
    yield case("min_all", lambda x: torch.relu(x).min(), IMAGE)
    yield case("max_first", lambda x: x.max(1)[0], (3, 7))
    yield case("min_first", lambda x: x.min(0, keepdim=True)[0], (3, 7))


def repetitions() -> Iterator[Case]:
    for name, times in {
        "rows": (2, 1, 3, 1),
        "more": (2, 1, 1, 1, 2),
        "one": (1, 1, 1, 1),
    }.items():
        yield case(f"repeat_{name}", lambda x, t=times: torch.relu(x.repeat(t)), IMAGE)
    yield case("tile", lambda x: torch.relu(x.tile(2, 3)), IMAGE)
    yield case("repeat_each", lambda x: torch.relu(x.repeat_interleave(3, 1)), IMAGE)


def turns() -> Iterator[Case]:
    for name, function in {
        "matrices": lambda x: x.mT,
        "conjugates": lambda x: x.mH,
        "moved": lambda x: x.movedim(1, -1),
        "moved_two": lambda x: x.movedim((3, 0), (0, 2)),
        "swapped": lambda x: x.swapaxes(0, -1),
        "swapped_dims": lambda x: x.swapdims(1, 2),
        "all": lambda x: x[0, 0].T,
    }.items():
        yield case(f"turn_{name}", lambda x, f=function: torch.relu(f(x)), IMAGE)


def choices() -> Iterator[Case]:
    for name, indices in {
        "one": [1],
        "turned": [3, 2, 1, 0],
        "halves": [2, 3, 0, 1],
        "many": [0, 1, 3, 3, 0, 2, 2, 3, 1, 0, 1, 2],
        "all": [0, 1, 2, 3],
    }.items():
        chosen = torch.tensor(indices)
        yield case(f"choose_{name}", lambda x, i=chosen: torch.relu(x.index_select(2, i)), IMAGE)
        yield case(f"index_{name}", lambda x, i=chosen: torch.relu(x[:, :, i - 4]), IMAGE)
    yield case("flip", lambda x: torch.relu(x.flip((0, -1))), IMAGE)
    yield case("flip_one", lambda x, m: m(m(x).flip(1)), IMAGE, parts=(nn.Conv2d(3, 3, 1),))
    for size in (5, 6, 7, 64, 100, 129):
        yield case(f"flip_{size}", lambda x: torch.relu(x.flip(1)), (2, size, 3))
    for mode in ("reflect", "replicate", "circular"):
        yield from paddings(mode)
    channels = torch.tensor([2, 0, 1])
    yield case(
        "choose_channels",
        lambda x, m: m(m(x)[:, channels]),
        IMAGE,
        parts=(nn.Conv2d(3, 3, 1),),
    )
    yield case("cat_many", lambda x: torch.cat([x * n for n in range(1, 13)], 1), IMAGE)


def paddings(mode: Any) -> Iterator[Case]:
    """Yield paddings with elements of the tensor itself, few and many, of all ranks."""
    prefix = "wrap" if mode == "circular" else "pad"
    for name, shape, amounts in (
        ("line", (2, 3, 11), (3, 2)),
        ("line_left", (2, 3, 11), (1, 0)),
        ("image", IMAGE, (2, 1, 0, 3)),
        ("volume", (1, 2, 4, 5, 6), (1, 2, 3, 0, 1, 1)),
        ("many", (1, 2, 180), (157, 0)),
    ):

        def call(x: torch.Tensor, amounts: Any = amounts) -> Any:
            return torch.relu(F.pad(x * 2, amounts, mode=mode)) + 1

        yield case(f"{prefix}_{mode}_{name}", call, shape)
    before = nn.Conv2d(3, 4, 3, padding=2, padding_mode=mode)
    yield case(f"{prefix}_{mode}_conv", lambda x, m: m(m(x)[:, :3]), IMAGE, parts=(before,))
    infinite = torch.randn(1, 2, 80)
    infinite[..., ::7] = torch.inf
    yield case(
        f"{prefix}_{mode}_dynamic",
        lambda x: F.pad(x.abs(), (33, 20), mode=mode) * 2,
        (3, 2, 80),
        dynamic=(({0: Dim("batch", max=64)},),),
        others=((torch.randn(7, 2, 80),), (infinite,)),
    )


class Recurrent(nn.Module):
    """A recurrent layer with all its results side by side."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layer = kind(5, 7, **options)

    def forward(self, x: torch.Tensor, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = (states if len(states) > 1 else states[0],) if states else ()
        result, last = self.layer(x, *given)
        return (result, *(last if isinstance(last, tuple) else (last,)))


def recurrent() -> Iterator[Case]:
    forms: dict[str, dict[str, Any]] = {
        "plain": {},
        "batch_first": {"batch_first": True},
        "two_ways": {"bidirectional": True, "num_layers": 2},
        "no_bias": {"bias": False, "num_layers": 2},
    }
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for name, options in forms.items():
            many = int(options.get("num_layers", 1)) * (2 if "bidirectional" in options else 1)
            batch = 4 if "batch_first" in options else 3
            state = torch.randn(many, batch, 7)
            states = (state, state + 1) if kind is nn.LSTM else (state,)
            x = torch.randn(4, 3, 5)
            model = Recurrent(kind, **options).eval()
            label = f"{kind.__name__.lower()}_{name}"
            yield Case(f"recurrent_{label}", model, (x,))
            yield Case(f"recurrent_{label}_given", model, (x, *states))
    yield Case(
        "recurrent_relu",
        Recurrent(nn.RNN, nonlinearity="relu"),
        (torch.randn(4, 3, 5),),
    )
    several = Dim("batch", min=1, max=9)
    yield Case(
        "recurrent_dynamic",
        Recurrent(nn.GRU, batch_first=True),
        (torch.randn(3, 4, 5), torch.randn(1, 3, 7)),
        dynamic=({0: several}, ({1: several},)),
        others=((torch.randn(8, 4, 5), torch.randn(1, 8, 7)),),
    )
