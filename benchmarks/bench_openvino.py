"""Real models through OpenVINO: our files, our XNNPACK files, ExecuTorch's own, OpenVINO directly.

One core; the files run in the official runtime, in turn with a call of OpenVINO's own frontend
from Python. ExecuTorch's files let a processor with bfloat16 compute in it, so there are rows of
ours that do the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness import Row, chosen, told_by
from benchmarks.openvino_files import FILES

PACKAGE = "openvino"
MODELS = (
    *("torchvision/mobilenet_v2", "torchvision/mobilenet_v3_small", "torchvision/resnet18"),
    *("torchvision/shufflenet_v2_x1_0", "torchvision/efficientnet_b0", "torchvision/densenet121"),
    *("torchvision/convnext_tiny", "torchvision/swin_t", "timm/mobilenetv4_conv_small"),
    *("timm/vit_tiny_patch16_224", "timm/mixer_s32_224", "timm/levit_128s"),
    *("transformers/bert", "transformers/clip", "transformers/gpt2", "transformers/wav2vec2"),
    *("own/unet_bilinear", "own/encoder", "own/mlp", "own/yolo"),
)
"""Twenty of the models that XNNPACK is compared on: of images, of text, of sound."""
_GOAL = "at most 1.05 of OpenVINO called directly"


def rows(quick: bool, models: Sequence[str] = ()) -> Iterator[Row]:
    """Yield rows for each model against OpenVINO itself and ExecuTorch's, and medians."""
    direct, peers = [], []
    for model in MODELS[:2] if quick and not models else chosen(MODELS, models):
        made, run = {}, {}
        try:
            _step("export", model)
            for name in FILES:
                made[name] = _step(name, model)
            run = _step("run", model, *(name for name in FILES if "fails" not in made[name]))
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1][:160]
            yield Row(PACKAGE, f"run {model}", 0.0, goal=_GOAL, met=False, note=reason)
            continue
        row = _beside_direct(model, made, run)
        direct.append(row.ratio or 0.0)
        yield row
        yield (row := _beside_peer(model, made, run))
        if row.ratio:
            peers.append(row.ratio)
    found = statistics.median(direct)
    yield Row(
        *(PACKAGE, f"median of {len(direct)} models, beside OpenVINO called directly"),
        *(found, None, "x", ">= 0.95x", found >= 1 / 1.05),
    )
    yield Row(
        *(PACKAGE, f"median of {len(peers)} models, beside ExecuTorch's own, precision chosen"),
        *(statistics.median(peers), None, "x"),
    )


def _beside_direct(model: str, made: dict[str, Any], run: dict[str, Any]) -> Row:
    ours, direct, xnnpack = run["ours"], run["direct"], run["xnnpack"]
    met = direct["ratio"] >= 1 / 1.05
    note = (
        f"{made['ours']['delegates']} delegates, {_left(made['ours'])} calls left; error"
        f" {ours['error']:.1g}; XNNPACK {xnnpack['ms']:.3g} ms; lowered in"
        f" {made['ours']['seconds']:.2g} s"
    )
    figures = (ours["ms"], ours["ms"] * direct["ratio"])
    return Row(
        PACKAGE, f"run {model}, float32", *figures, unit="ms", goal=_GOAL, met=met, note=note
    )


def _beside_peer(model: str, made: dict[str, Any], run: dict[str, Any]) -> Row:
    case, ours = f"run {model}, precision chosen by the processor", run["free"]
    if "peer" not in run:
        note = f"ExecuTorch's own: {made['peer']['fails']}"
        return Row(PACKAGE, case, ours["ms"], unit="ms", note=note)
    ratio = run["peer"]["ratio"] / ours["ratio"]
    figures = (ours["ms"], ours["ms"] * ratio)
    note = (
        f"ExecuTorch's own: {made['peer']['delegates']} delegates, {_left(made['peer'])} calls"
        f" left, lowered in {made['peer']['seconds']:.2g} s; error {ours['error']:.1g} against"
        f" {run['peer']['error']:.1g}"
    )
    return Row(PACKAGE, case, *figures, unit="ms", note=note)


def _left(told: dict[str, Any]) -> int:
    return sum(told["left"].values())


def _step(name: str, model: str, *words: str) -> dict[str, Any]:
    """Run a step in a separate process; of the peer's, return how it fails."""
    words = ("-m", "benchmarks.openvino_files", name, model, *words)
    try:
        found: dict[str, Any] = told_by(*words, one_core=name == "run")
    except RuntimeError as error:
        if name != "peer":
            raise
        return {"fails": str(error).splitlines()[-1][:120]}
    return found
