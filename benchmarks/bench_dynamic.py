"""Models with every dimension dynamic, against the same with fixed sizes and ExecuTorch's.

Files run at the sizes that the program was exported with, in the official runtime, in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness import Row, chosen
from benchmarks.xnnpack_pairs import beside_fixed, compared

PACKAGE = "xnnpack"
MODELS = (
    *("transformers/llama_256", "transformers/bert_256", "transformers/gpt2", "transformers/t5"),
    *("transformers/whisper", "timm/vit_tiny_patch16_224", "torchvision/resnet18"),
    *("torchvision/mobilenet_v2", "torchvision/swin_t", "transformers/segformer"),
    *("transformers/wav2vec2", "transformers/conformer", "own/unet_bilinear", "own/lstm"),
)
_GOAL = "at most 1.2 of fixed sizes; 2 delegates and 10 calls more; no slower than the peer"


def rows(quick: bool, models: Sequence[str] = ()) -> Iterator[Row]:
    """Yield a row for each model, and then what they come to.

    Args:
        quick: Two models.
        models: Patterns of names; all when none is given.
    """
    names = chosen(dict.fromkeys(MODELS), models)
    shares = []
    for model in names[:2] if quick and not models else names:
        try:
            fixed, run = beside_fixed(model)
            found = compared(model, "varying")
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1][:120]
            yield Row(PACKAGE, f"dynamic {model}", 0.0, goal=_GOAL, met=False, note=reason)
            continue
        shares.append(1 / run["ratio"])
        yield _row(model, fixed, run, found)
    share = statistics.median(shares)
    case = f"dynamic beside fixed sizes, median of {len(shares)} models"
    yield Row(PACKAGE, case, share, 1.0, "x", "<= 1.1", share <= 1.1)


def _row(model: str, fixed: dict[str, Any], run: dict[str, Any], found: dict[str, Any]) -> Row:
    ours, peer = found["ours"], found["peer"]
    share = 1 / run["ratio"]
    more = [a - b for a, b in zip(_counts(ours), _counts(fixed), strict=True)]
    theirs = f"ExecuTorch fails: {found['fails']}"
    is_slower = False
    if peer:
        is_slower = found["run"]["high"] < 1
        theirs = (
            f"{_text(peer)}, {found['run']['ratio']:.2f} of our time, lowered in"
            f" {peer['seconds']:.1f} s"
        )
    note = (
        f"{share:.2f} of fixed; {_text(ours)}, lowered in {ours['seconds']:.2f} s, error"
        f" {run['errors'][0]:.1g}; fixed: {_text(fixed)}, {fixed['seconds']:.2f} s; peer: {theirs}"
    )
    met = share <= 1.2 and more[0] <= 2 and more[1] <= 10 and not is_slower
    times = (run["ours"], run["ours"] * found["run"]["ratio"] if peer else None)
    return Row(PACKAGE, f"dynamic {model}", *times, goal=_GOAL, met=met, note=note)


def _counts(told: dict[str, Any]) -> tuple[int, int]:
    return told["delegates"], sum(told["left"].values())


def _text(told: dict[str, Any]) -> str:
    delegates, calls = _counts(told)
    return f"{delegates} delegates, {calls} calls, {told['planned'] / 1e6:.1f} MB planned"
