"""Language models in the official runner: the tokens that transformers gives."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import warnings

import pytest

from lowerdeck_zoo.models.libraries import import_torchvision

import_torchvision()  # transformers imports it, which may be of another build

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from folders import FAMILIES, PROMPT, greedy, save_folder, small_model, tokenizer

    from lowerdeck.language_models import export_language_model
    from lowerdeck.language_models.exporting import lower_decoder, prepared
    from lowerdeck.language_models.generating import Timing, generate, inputs_of, open_model

COUNT = 24
CONTEXT = 64
LONG = 64

RUNNER = """
import json, os, sys
import torch
from executorch.extension.llm.runner import _llm_runner
root = os.path.dirname(_llm_runner.__file__) + "/../../.."
torch.ops.load_library(root + "/extension/llm/custom_ops/libcustom_ops_aot_lib.so")
torch.ops.load_library(root + "/kernels/quantized/libquantized_ops_aot_lib.so")
file, words, prompt, count = sys.argv[1:]
runner = _llm_runner.TextLLMRunner(file, words)
config = _llm_runner.GenerationConfig()
config.max_new_tokens, config.temperature, config.echo = int(count), 0.0, False
texts = []
for _ in range(2):
    said = []
    runner.generate(prompt, config, said.append, None)
    texts.append("".join(said))
    runner.reset()
print(json.dumps(texts))
"""


def officially(file, folder, count=COUNT):
    """Return the text that the official runner generates, twice, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, file, folder / "tokenizer.json", PROMPT, str(count)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    one, other = json.loads(done.stdout.strip().splitlines()[-1])
    assert one == other, "the second text does not begin anew"
    return one


EXPERTS = {"num_local_experts": 4}  # of mixtures
CUSTOM = {"attention": "custom-kernel"}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((one, {}) for one in ("Llama", "Qwen3", "Mixtral")),
        *((one, CUSTOM) for one in ("Llama", "Qwen3", "Mixtral")),
        *(("Llama", {"backend": "portable"}), ("Qwen3", {"prefill_chunk": 3})),
        ("Llama", {"separate_decode": True}),
    ],
    ids=str,
)
def test_the_official_runner_says_what_transformers_says(family, settings, tmp_path):
    words = plain_tokenizer()
    words.save(str(tmp_path / "tokenizer.json"))
    model = small_model(family, tie_word_embeddings=False, **EXPERTS)
    file = tmp_path / "model.pte"
    export_language_model(model, context=CONTEXT, **settings).save(file)
    wanted = words.decode(greedy(model, words.encode(PROMPT).ids, COUNT))
    assert officially(file, tmp_path) == wanted


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {"quantize": "8da4w"}),
        ("Llama", {"quantize": "8da4w", "quantize_embedding": 8, **CUSTOM}),
        ("Llama", {"quantize": "8da8w", "quantize_embedding": 4}),
        ("Llama", {"quantize": "fp16"}),
        ("Llama", {"separate_decode": True}),
        ("Llama", {"separate_decode": True, "quantize": "8da4w", **CUSTOM}),
        ("Mixtral", {"quantize": "8da4w"}),
        ("Mixtral", {"quantize": "8da8w", **CUSTOM}),
    ],
    ids=str,
)
def test_quantised_files_are_near_the_quantised_model(family, settings, tmp_path):
    """Logits of the official runtime beside those of the same weights in eager mode."""
    model = small_model(family, **EXPERTS)
    if family == "Llama":
        model = tmp_path / "folder"
        save_folder(model)
    near_the_model(model, tmp_path / "model.pte", settings)


def near_the_model(model, file, settings):
    """Export a model, and hold what the official runtime says to it with the same weights."""
    import torch

    asked = {
        "quantize": "none",
        "group": 32,
        "quantize_embedding": None,
        "context": CONTEXT,
        "backend": "xnnpack",
        "attention": "delegate",
        "prefill_chunk": None,
        "separate_decode": False,
    }
    made = prepared(model, **(asked | settings))
    lower_decoder(made).save(file)
    ids = tokenizer().encode(PROMPT).ids
    found = list(
        generate(open_model(file), ids, COUNT, official=True, timing=(timing := Timing()))
    )
    assert "official" in timing.runtime
    with torch.no_grad():
        text = [*ids, *found]
        made.decoder(*inputs_of(text[: len(ids) - 1], 0))
        for position in range(len(ids) - 1, len(text) - 1):
            logits = made.decoder(*inputs_of(text[position : position + 1], position))[0, -1]
            # What was chosen is the model's own choice, or as good within the rounding.
            error = 0.02 * float(logits.abs().max())
            assert float(logits.max() - logits[text[position + 1]]) <= error


def plain_tokenizer():
    """Return a tokenizer all of whose tokens are ASCII, which the runner's binding can tell."""
    letters, drawn = "abcdefghijklmnopqrstuvwxyz", random.Random(0)
    made_up = " ".join("".join(drawn.choices(letters, k=5)) for _ in range(2000))
    return tokenizer(PROMPT * 9, made_up)


def settled(family, folder, dtype, ids):
    """Save a model whose choices are clear, and return what it generates in float32.

    No choice is within ten times of what another order of computing makes of the logits, and no
    text ends early: of random weights one draw in a few is like that.
    """
    import torch
    from transformers import AutoModelForCausalLM

    for seed in range(40):
        model = small_model(family, tie_word_embeddings=False)
        drawn = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5, generator=drawn)
        model.to(dtype).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokens = greedy(model, ids, LONG)
        with torch.no_grad():
            text = torch.tensor([[*ids, *tokens]])
            whole = model(text, use_cache=False).logits[0, len(ids) - 1 : -1]
            steps = [
                model(text[:, :n], use_cache=False).logits[0, -1]
                for n in range(len(ids), text.shape[1])
            ]
        error = float((torch.stack(steps) - whole).abs().max())
        margin = float(whole.topk(2).values.diff().abs().min())
        if margin > 10 * error and not {0, 1} & {*tokens}:
            return tokens, seed, margin, error
    raise AssertionError(f"no draw of {family} is settled")


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_say_64_tokens_as_transformers_does(family, dtype, tmp_path, capsys):
    import torch

    words = plain_tokenizer()
    ids = words.encode(PROMPT).ids
    tokens, *figures = settled(family, tmp_path / "in", getattr(torch, dtype), ids)
    with capsys.disabled():
        print("\nseed, least margin, error, distinct tokens:", *figures, len({*tokens}))
    words.save(str(tmp_path / "tokenizer.json"))
    file = tmp_path / "model.pte"
    export_language_model(tmp_path / "in", context=128).save(file)
    assert officially(file, tmp_path, LONG) == words.decode(tokens)
    ours = open_model(file)
    found = generate(ours, ids, LONG, official=False, timing=Timing())
    assert list(found) == tokens
