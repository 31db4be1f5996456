"""Language models in the official ``TextLLMRunner``, against optimum-executorch's files.

``OPTIMUM_PYTHON`` names the Python of an environment that has optimum-executorch 1.1, which wants
another transformers; without it our files have no peer. Runners of both take turns, on one core.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Row, fresh_process, told_by

PACKAGE = "language_models"
CONTEXT = 256
ROUNDS = 3
OPTIMUM = os.environ.get("OPTIMUM_PYTHON", "")

_MODELS: dict[str, dict[str, int]] = {
    "6 layers of 512": {"hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 1536},
    "24 layers of 1,024": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "intermediate_size": 2816,
    },
}


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to make a file.

    Attributes:
        name: In words.
        ours: Arguments of ``export_language_model``.
        peer: Options of ``optimum-cli``.
        bound: What our time for a token may be of the peer's at most.
    """

    name: str
    ours: Mapping[str, object]
    peer: tuple[str, ...]
    bound: float


_CUSTOM = ("--use_custom_sdpa", "--use_custom_kv_cache")
_INT4 = ("--qlinear", "8da4w", "--qlinear_group_size", "32", "--qembedding", "8w")
_IN_INT4 = {"quantize": "8da4w", "quantize_embedding": 8}
_MODES = (
    Mode("float32, custom kernels", {"attention": "custom-kernel"}, _CUSTOM, 1.0),
    Mode("float32 on a stock runtime", {}, _CUSTOM, 1.3),
    Mode(
        "float16 weights, custom kernels",
        {"attention": "custom-kernel", "quantize": "fp16"},
        _CUSTOM,
        1.0,
    ),
    Mode(
        "8da4w, custom kernels",
        {**_IN_INT4, "attention": "custom-kernel"},
        (*_CUSTOM, *_INT4),
        1 / 1.15,
    ),
    Mode("8da4w on a stock runtime", {"quantize": "8da4w"}, (*_CUSTOM, *_INT4), 1.3),
)

_FOLDER = """
import json, sys
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=512, num_attention_heads=8, num_key_value_heads=4,
                     max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
                     **json.loads(sys.argv[2]))
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
made = Tokenizer(models.BPE())
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], show_progress=False,
                              initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
made.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
made.save(sys.argv[1] + "/tokenizer.json")
json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"},
          open(sys.argv[1] + "/tokenizer_config.json", "w"))
"""
_TIMED = """
import time
spent = 0.0
def timed(function):
    def call(*args, **kwargs):
        global spent
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent += time.process_time() - start
    return call
"""
_OURS = f"""{_TIMED}
import json, sys
from lowerdeck.language_models import export_language_model, exporting
exporting.lower = timed(exporting.lower)
made = export_language_model(sys.argv[1], context=256, **json.loads(sys.argv[3]))
timed(made.save)(sys.argv[2])
print("FIGURE lowering", spent)
"""
_PEER = f"""{_TIMED}
import sys
from executorch import exir
exir.to_edge_transform_and_lower = timed(exir.to_edge_transform_and_lower)
manager = exir.EdgeProgramManager
manager.to_executorch = timed(manager.to_executorch)
folder, out = sys.argv[1:3]
sys.argv = ["optimum-cli", "export", "executorch", "--model", folder, "--task", "text-generation",
            "--recipe", "xnnpack", "--max_seq_len", "256", "--output_dir", out, *sys.argv[3:]]
from optimum.commands.optimum_cli import main
main()
print("FIGURE lowering", spent)
"""
_RUN = """
import importlib, json, sys
# Registers kernels with the runtime that the runner has: both files may name them.
importlib.import_module("executorch.extension.llm.custom_ops.custom_ops")
importlib.import_module("executorch.kernels.quantized")
runner = importlib.import_module("executorch.extension.llm.runner._llm_runner")
made = runner.TextLLMRunner(sys.argv[1], sys.argv[2])
config = runner.GenerationConfig()
config.max_new_tokens, config.temperature, config.echo = 99, 0.0, False
prompt = " ".join(["the quick brown fox jumps over the lazy dog"] * 16)
best = [float("inf")] * 2
for _ in range(3):
    told = []
    made.generate(prompt, config, None, told.append)
    made.reset()
    one = told[-1]
    read, said = one.num_prompt_tokens, one.num_generated_tokens
    best[0] = min(best[0], (one.prompt_eval_end_ms - one.inference_start_ms) / read)
    best[1] = min(best[1], (one.inference_end_ms - one.prompt_eval_end_ms) / said)
print(json.dumps(best))
"""


def rows(quick: bool) -> Iterator[Row]:
    """Yield what making files costs, and a token of the prompt and of the answer.

    Args:
        quick: The smallest model only.
    """
    for model, sizes in list(_MODELS.items())[: 1 if quick else None]:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made, "model")
            fresh_process(_FOLDER, str(folder), json.dumps(sizes))
            peers: dict[tuple[str, ...], tuple[Path, dict[str, float]]] = {}
            for mode in _MODES:
                # Of the largest only what people would put on a phone.
                if model.startswith("24") and "8da4w" not in mode.name:
                    continue
                yield from _rows_of(model, mode, folder, peers)


def _rows_of(
    model: str,
    mode: Mode,
    folder: Path,
    peers: dict[tuple[str, ...], tuple[Path, dict[str, float]]],
) -> Iterator[Row]:
    ours = folder.parent / "ours.pte"
    cost = fresh_process(_OURS, str(folder), str(ours), json.dumps(mode.ours))
    if OPTIMUM and mode.peer not in peers:
        out = folder.parent / f"peer{len(peers)}"
        figures = fresh_process(_PEER, str(folder), str(out), *mode.peer, python=OPTIMUM)
        peers[mode.peer] = (next(out.glob("*.pte")), figures)
    files = [ours] + ([peers[mode.peer][0]] if OPTIMUM else [])
    best = _in_turn(files, folder / "tokenizer.json")
    case = f"{model}, {mode.name}"
    note = "optimum-executorch with its custom attention and cache" if OPTIMUM else ""
    for index, what in enumerate(("prefill", "decoding")):
        mine, theirs = best[0][index], best[1][index] if OPTIMUM else None
        goal = f"at most {mode.bound:.2f} of the peer's time"
        met = mine <= mode.bound * theirs if theirs else None
        yield Row(
            PACKAGE,
            f"{case}: {what}, a token",
            mine,
            theirs,
            "ms",
            goal if theirs else "",
            met,
            note,
        )
    size = ours.stat().st_size / 1e6
    if not OPTIMUM:
        yield Row(PACKAGE, f"{case}: file", size, unit="MB")
        return
    file, theirs_cost = peers[mode.peer]
    their_size = file.stat().st_size / 1e6
    yield Row(
        PACKAGE, f"{case}: file", size, their_size, "MB", "no larger", size <= their_size, note
    )
    yield Row(
        *(PACKAGE, f"{case}: folder to file, with imports", cost["cpu"], theirs_cost["cpu"], "s"),
        *(">= 10x", theirs_cost["cpu"] >= 10 * cost["cpu"], note),
    )
    mine, theirs = cost["lowering"], theirs_cost["lowering"]
    yield Row(
        *(PACKAGE, f"{case}: exported program to file, each its own", mine, theirs, "s"),
        *(">= 30x", theirs >= 30 * mine, "to_edge_transform_and_lower and to_executorch"),
    )
    yield Row(
        *(PACKAGE, f"{case}: peak memory of making it", cost["peak_mb"], theirs_cost["peak_mb"]),
        *("MB", "lower", cost["peak_mb"] < theirs_cost["peak_mb"], note),
    )


def _in_turn(files: list[Path], tokenizer: Path) -> list[list[float]]:
    """Return the least milliseconds a token of the prompt and of the answer, of each file."""
    best = [[float("inf")] * 2 for _ in files]
    for _ in range(ROUNDS):
        for place, file in enumerate(files):
            found = told_by("-c", _RUN, file, tokenizer, one_core=True)
            best[place] = [min(pair) for pair in zip(best[place], found, strict=True)]
    return best
