"""Torch's own layers that look at no size are called alone with any, and are eager's then."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import InputConstraintError, export_preserving, unflatten

FLAT, ROWS, PICTURE, VOLUME = (4, 8), (4, 6, 8), (4, 6, 8, 8), (4, 6, 4, 4, 4)

Shape = tuple[int, ...]
Made = Callable[[], nn.Module]

PLAIN = [
    "GELU",
    "Tanh",
    "Sigmoid",
    "Softplus",
    "LogSigmoid",
    "Softsign",
    "Tanhshrink",
    "Hardshrink",
    "Softshrink",
    "PReLU",
    "GLU",
    "Flatten",
]
IN_PLACE = [
    "ReLU",
    "ReLU6",
    "SELU",
    "CELU",
    "ELU",
    "Hardtanh",
    "Hardswish",
    "Hardsigmoid",
    "SiLU",
    "Mish",
    "LeakyReLU",
    "RReLU",
    "Dropout",
    "AlphaDropout",
]


def layers() -> Iterator[tuple[str, Made, Shape]]:
    for name in PLAIN:
        yield name, getattr(nn, name), ROWS
    for name in IN_PLACE:
        yield name, getattr(nn, name), ROWS
        yield f"{name} in place", partial(getattr(nn, name), inplace=True), ROWS
    yield "Threshold", lambda: nn.Threshold(0.1, 0.2), ROWS
    for dim in (-1, 1):
        for name in ("Softmax", "LogSoftmax", "Softmin"):
            yield f"{name} {dim}", partial(getattr(nn, name), dim), ROWS
    yield "Softmax2d", nn.Softmax2d, PICTURE
    yield "Linear", lambda: nn.Linear(8, 3), ROWS
    yield "LayerNorm", lambda: nn.LayerNorm(8), ROWS
    yield "RMSNorm", lambda: nn.RMSNorm(8), ROWS
    yield "GroupNorm", lambda: nn.GroupNorm(2, 6), PICTURE
    yield "PixelShuffle", lambda: nn.PixelShuffle(2), (4, 8, 4, 4)
    yield "PixelUnshuffle", lambda: nn.PixelUnshuffle(2), PICTURE
    yield "ChannelShuffle", lambda: nn.ChannelShuffle(2), PICTURE
    for rank, shape in ((1, ROWS), (2, PICTURE), (3, VOLUME)):
        for name, arguments in {
            "BatchNorm": (6,),
            "Conv": (6, 4, 3),
            "ConvTranspose": (6, 4, 3),
            "AvgPool": (2,),
            "MaxPool": (2,),
            "AdaptiveAvgPool": (1,),
            "ZeroPad": (1,),
            "ConstantPad": (1, 0.5),
            "ReflectionPad": (1,),
            "ReplicationPad": (1,),
            "CircularPad": (1,),
        }.items():
            made = getattr(nn, f"{name}{rank}d")
            yield f"{name}{rank}d", partial(made, *arguments), shape


LAYERS = list(layers())


class Calls(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x * 1)


def layer_of(made: Made, shape: Shape, how: str) -> tuple[nn.Module, nn.Module]:
    """Return a layer as eager has it, and out of a program."""
    eager = made().eval()
    for tensor in (*eager.parameters(), *eager.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.1, 1)
    if how == "preserving":
        module = unflatten(export_preserving(Calls(eager).eval(), (torch.randn(shape),)))
    else:
        program = torch.export.export(Calls(eager).eval(), (torch.randn(shape),))
        module = unflatten(program, preserve="all")
    return eager, module.get_submodule("layer")


@pytest.mark.parametrize("how", ["preserving", "flat"])
@pytest.mark.parametrize(("name", "made", "shape"), LAYERS, ids=[each[0] for each in LAYERS])
def test_a_layer_takes_any_size(name: str, made: Made, shape: Shape, how: str) -> None:
    """The README named activations; softmax, most in place, norms and pools were refused."""
    eager, module = layer_of(made, shape, how)
    others = [(1, *shape[1:]), (7, *shape[1:])]
    if "Norm" not in name and name != "Linear":
        others.append((*shape[:-1], 2 * shape[-1]))
    if name not in {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "Flatten"}:
        others.append(shape[1:])
    for other in others:
        x = torch.randn(other)
        try:
            want = eager(x.clone())
        except (RuntimeError, ValueError, IndexError):
            continue
        torch.testing.assert_close(module(x.clone()), want)


def test_identity_too() -> None:
    _, module = layer_of(nn.Identity, ROWS, "preserving")
    x = torch.randn(3, 2)
    assert module(x) is x or torch.equal(module(x), x)


class OtherOutput(nn.Module):
    """Gives a layer a size as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ConvTranspose1d(6, 4, 3, stride=2)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x * 1, [18])


LOOKS: dict[str, tuple[Made, Shape, Shape]] = {
    "softmax of a chosen dimension": (lambda: nn.Softmax(None), ROWS, FLAT),
    "log softmax of one": (lambda: nn.LogSoftmax(None), FLAT, ROWS),
    "a side that is kept": (lambda: nn.AdaptiveAvgPool2d((None, 1)), PICTURE, (4, 6, 4, 8)),
    "norm of what it is given": (
        lambda: nn.BatchNorm1d(6, track_running_stats=False),
        ROWS,
        (1, 6, 1),
    ),
    "norm of each picture": (lambda: nn.InstanceNorm1d(6), ROWS, ROWS[1:]),
}


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("name", LOOKS)
def test_what_looks_at_a_size_is_held_to_it(name: str) -> None:
    made, shape, other = LOOKS[name]
    eager, module = layer_of(made, shape, "preserving")
    x = torch.randn(shape)
    torch.testing.assert_close(module(x), eager(x))
    with pytest.raises(InputConstraintError, match="was recorded as"):
        module(torch.randn(other))


def test_a_layer_that_is_given_a_size_is_held_to_it() -> None:
    eager, x = OtherOutput().eval(), torch.randn(4, 6, 8)
    module = unflatten(export_preserving(eager, (x,)))
    again = copy.deepcopy(module).get_submodule("layer")
    torch.testing.assert_close(again(x, [18]), eager.layer(x, [18]))
    with pytest.raises(InputConstraintError, match="recorded as 18; found 17"):
        again(x, [17])
