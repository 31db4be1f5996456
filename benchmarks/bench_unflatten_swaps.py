"""Modules of real models replaced by eager's, one at a time, with and without signatures."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any

import torch
import transformers
from torch.export import Dim, ExportedProgram

from benchmarks import xnnpack_models
from benchmarks.harness import Row
from lowerdeck.torch_base import varies
from lowerdeck.unflatten import UnflattenError, export_preserving
from lowerdeck_zoo.models.transformers_small import CONFIGURED, First
from tests.peers.unflatten_swaps import plain_sweep, sweep

PACKAGE = "unflatten"
VISION = (
    "torchvision/resnet18",
    "torchvision/mobilenet_v3_small",
    "torchvision/squeezenet1_1",
    "torchvision/shufflenet_v2_x1_0",
    "torchvision/VisionTransformer",
    "torchvision/SwinTransformer",
    "timm/mobilenetv4_conv_small",
    "timm/vit_tiny_patch16_224",
    "timm/convnextv2_atto",
)
"""Models of pictures, where torchvision and timm are installed, of published or small sizes."""

SMALL: dict[str, tuple[dict[str, Any], int]] = {
    "torchvision/VisionTransformer": (
        {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 64}
        | {"mlp_dim": 128},
        32,
    ),
    "torchvision/SwinTransformer": (
        {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
        | {"window_size": [7, 7]},
        56,
    ),
}
"""Configurations of torchvision's classes, and the sides of their pictures."""


def rows(quick: bool) -> Iterator[Row]:
    """Yield the swap table: a row for each model.

    Args:
        quick: A few models.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Before transformers asks for it.
    xnnpack_models.import_torchvision()
    all_found: Counter[str] = Counter()
    all_plain: Counter[str] = Counter()
    for name, build in islice(_models(), 3 if quick else None):
        torch.manual_seed(0)
        eager, args = build()
        with torch.no_grad():
            found, reasons = sweep(eager, args)
            try:
                plain = plain_sweep(eager, args)
            except UnflattenError:
                plain = Counter(failed=1)
        all_found += found
        all_plain += plain
        yield _row(name, found, plain, reasons)
    yield _row("all of these models", all_found, all_plain)
    yield _varying_row(quick)


def _varying_row(quick: bool) -> Row:
    """Return the row of all models exported with sizes that vary, and called with other ones."""
    all_found: Counter[str] = Counter()
    count = fixed = 0
    for _, build in islice(_models(), 3 if quick else None):
        torch.manual_seed(0)
        eager, args = build()
        program = _varying_program(eager, args)
        others = _of_other_sizes(program, args)
        if all(other is arg for other, arg in zip(others, args, strict=True)):
            fixed += 1  # its own code fixes each size that we let vary
            continue
        with torch.no_grad():
            found, _ = sweep(eager, others, program)
        all_found += found
        count += 1
    right, refused, wrong = _summed(all_found)
    tried = right + refused + all_found["wrong"]
    share = 100 * right / tried
    return Row(
        PACKAGE,
        f"swaps, {count} models exported with sizes that vary, called with other sizes",
        share,
        None,
        "% right",
        ">= 99 %, 0 wrong",
        share >= 99 and not wrong,
        f"of {tried}: {refused} refused, {wrong} wrong; {fixed} more fix their sizes",
    )


def _varying_program(eager: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> ExportedProgram:
    """Export a model whose batch varies, and whose length does where it is given tokens."""
    examples = tuple(torch.cat([arg, arg]) if len(arg) == 1 else arg for arg in args)
    dims = tuple(
        dict.fromkeys(range(1 if arg.is_floating_point() else 2), Dim.AUTO) for arg in args
    )
    shapes = (dims,) if isinstance(eager, First) else dims
    return export_preserving(eager, examples, dynamic_shapes=shapes)


def _of_other_sizes(
    program: ExportedProgram, args: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return arguments with three more in each dimension that varies."""
    names = program.graph_signature.user_inputs
    nodes = {node.name: node for node in program.graph.nodes}
    others = []
    for name, arg in zip(names, args, strict=True):
        other = arg
        for dim, size in enumerate(nodes[name].meta["val"].shape):
            if varies(size):
                more = other.narrow(dim, 0, 1).repeat_interleave(3, dim)
                other = torch.cat([other, more], dim)
        others.append(other)
    return tuple(others)


def _summed(found: Counter[str]) -> tuple[int, int, int]:
    """Return how many swaps were right, and refused, and what was wrong of any kind."""
    wrong = found["wrong"] + found["alone, wrong"] + found["changed, wrong"]
    return found["right"], found["refused"], wrong


def _models() -> Iterator[tuple[str, Callable[[], tuple[torch.nn.Module, Any]]]]:
    for item in CONFIGURED:
        yield item.model, partial(_configured, item)
    if find_spec("torchvision") and find_spec("timm"):
        for name in VISION:
            yield name, partial(_pictured, name)


def _configured(item: Any) -> tuple[torch.nn.Module, Any]:
    return item.build(transformers), item.calls()[0]


def _pictured(name: str) -> tuple[torch.nn.Module, Any]:
    eager, args = _small(name) if name in SMALL else xnnpack_models.build(name)
    for parameter in eager.parameters():
        # Some heads begin as zeros: whatever is swapped before them would have no effect.
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return eager, args


def _small(name: str) -> tuple[torch.nn.Module, Any]:
    config, side = SMALL[name]
    classes: Any = import_module("torchvision.models")
    return getattr(classes, name.split("/")[1])(**config).eval(), (torch.randn(1, 3, side, side),)


def _row(name: str, found: Counter[str], plain: Counter[str], reasons: Sequence[str] = ()) -> Row:
    right, refused, wrong = _summed(found)
    tried = right + refused + found["wrong"]
    share, plain_share = 100 * right / tried, 100 * plain["right"] / plain.total()
    met = share >= 99 and not wrong and not plain["wrong"]
    # Its first words, and those of one module that is refused for it.
    told = {reason.split(": ")[1].partition(", ")[0]: reason.split(": ")[0] for reason in reasons}
    why = "".join(f", as {path} {reason}" for reason, path in told.items())
    note = (
        f"of {tried}: {refused} refused{why}, {wrong} wrong; peer: a plain "
        f"export, of {plain.total()}: {plain['refused']} refused, {plain['wrong']} wrong"
    )
    goal = ">= 99 %, 0 wrong"
    return Row(PACKAGE, f"swaps, {name}", share, plain_share, "% right", goal, met, note)
