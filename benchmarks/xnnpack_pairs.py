"""Models through XNNPACK against ExecuTorch's own lowering, in the official runtime.

Files, and what came of two files run in turn, are kept in ``out/xnnpack``: what has not changed is
neither made nor run again, and several calls may share the work. It needs torchvision, timm,
transformers and torchao. Files run on one core, at real-time priority where that is allowed:
others may work on the other cores, as far as they leave it the memory.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness import told_by
from benchmarks.records import state_of
from benchmarks.xnnpack_files import FLOAT, KEPT, MODES, stem
from benchmarks.xnnpack_models import NAMES

QUANTIZED = (
    *("cnn", "mlp", "decoder", "mobilenet"),
    *("torchvision/resnet18", "torchvision/mobilenet_v2", "torchvision/squeezenet1_1"),
    *("timm/vit_tiny_patch16_224", "transformers/bert_256", "transformers/llama_256"),
    *("own/unet_bilinear", "own/yolo"),
)
"""The models of the quantised modes."""
_WITHOUT_LINEAR = ("torchvision/squeezenet1_1", "own/unet_bilinear", "own/yolo")
CASES = (
    *((name, form) for name in NAMES for form in FLOAT),
    *(
        (name, mode)
        for mode in MODES
        for name in QUANTIZED
        # torchao quantises linear layers alone.
        if mode in ("static", "dynamic", "fp16") or name not in _WITHOUT_LINEAR
    ),
)
"""All cases: a model and its form."""
_PEER_LIMIT = 240
"""CPU seconds that ExecuTorch may take to lower a model."""


def compared(model: str, form: str) -> dict[str, Any]:
    """Return what our file of a case and the peer's hold, and how they run.

    Raises:
        RuntimeError: A step of ours failed. Where the peer fails, ``"fails"`` says how, and the
            times are those of ours alone.
    """
    mine = _ours(model, form)
    theirs = _peer(model, form)
    found: dict[str, Any] = {"ours": mine, "peer": None, "fails": theirs.get("fails", "")}
    io = f"{stem(model, form)}.io"
    if not found["fails"]:
        try:
            return found | {"peer": theirs, "run": _run(mine, theirs, io)}
        except RuntimeError as error:
            found["fails"] = f"its file does not run: {_last_line(error)}"
    # Where ours is the file that fails, it does so by itself as well.
    return found | {"run": _run(mine, None, io)}


def _last_line(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[-1][:120]


def _ours(model: str, form: str) -> dict[str, Any]:
    if not Path(f"{stem(model, form)}.io").exists():
        _step("export", model, form)
    kept = Path(f"{stem(model, form)}.{_sources()}.json")
    return _kept(kept) or _keep(kept, _step("ours", model, form))


def _peer(model: str, form: str) -> dict[str, Any]:
    digest = Path(f"{stem(model, form)}.digest").read_text()
    path = KEPT / f"{digest}.peer.json"
    if told := _kept(path):
        return told
    try:
        return _keep(path, _step("peer", model, form))
    except RuntimeError as error:
        return _keep(path, {"fails": _last_line(error)})


@cache
def _sources() -> str:
    """Return a digest of all that our files are made by."""
    return state_of("xnnpack_models")


def _kept(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _keep(path: Path, figures: dict[str, Any]) -> dict[str, Any]:
    path.write_text(json.dumps(figures))
    return figures


def _run(
    mine: dict[str, Any], theirs: dict[str, Any] | None, io: str, other_io: str = ""
) -> dict[str, Any]:
    """Run two files in turn, or take what came of the same two before."""
    kept = KEPT / f"{mine['digest']}-{theirs['digest'] if theirs else 'alone'}.json"
    return _kept(kept) or _keep(
        kept, _step("run", mine["path"], theirs["path"] if theirs else "", io, other_io)
    )


def _step(*words: object) -> dict[str, Any]:
    """Run a step in a separate process and return its last line."""
    limit = _PEER_LIMIT if words[0] == "peer" else None
    step = ("-m", "benchmarks.xnnpack_files", *words)
    return dict(told_by(*step, one_core=words[0] == "run", limit=limit))


def beside_float(model: str, form: str, mine: dict[str, Any]) -> dict[str, Any]:
    """Return how our file runs against our own of the same model in float32."""
    other = _ours(model, FLOAT[0])
    # Inputs of half precision are no inputs of the other file: each has its own.
    return _run(mine, other, f"{stem(model, form)}.io", f"{stem(model, FLOAT[0])}.io")


def beside_fixed(model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what our file of a model with fixed sizes holds, and how the dynamic one runs."""
    fixed, varying = _ours(model, "fixed"), _ours(model, "varying")
    return fixed, _run(varying, fixed, f"{stem(model, 'varying')}.io")


def is_level(found: dict[str, Any]) -> bool:
    """Return whether our file is as fast as the peer's: by time, or because both do the same."""
    same = found["ours"]["nodes"] == found["peer"]["nodes"]
    same = same and found["ours"]["left"] == found["peer"]["left"]
    return bool(same or found["run"]["low"] >= 0.97)
