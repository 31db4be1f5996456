"""Language models in the official runner: the tokens that transformers gives."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "packages/language-models/tests"))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from folders import PROMPT, SMALL, greedy, save_folder, small_model, tokenizer

    from lowerdeck.language_models import export_language_model
    from lowerdeck.language_models.exporting import lower_decoder, prepared
    from lowerdeck.language_models.generating import Timing, generate, inputs_of, open_model

COUNT = 24
CONTEXT = 64

RUNNER = """
import json, os, sys
import torch
from executorch.extension.pybindings import _portable_lib
from executorch.extension.llm.runner import _llm_runner
root = os.path.dirname(_portable_lib.__file__) + "/../.."
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


def officially(file, folder):
    """Return the text that the official runner generates, twice, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, file, folder / "tokenizer.json", PROMPT, str(COUNT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    one, other = json.loads(done.stdout.strip().splitlines()[-1])
    assert one == other, "the second text does not begin anew"
    return one


def legible(model, words):
    """Let the model say whole letters alone: the runner's binding fails over a part of one."""
    import torch

    plain = {token for token in range(words.get_vocab_size()) if words.decode([token]).isascii()}
    with torch.no_grad():
        bias = torch.full((model.config.vocab_size,), -1e4)
        bias[sorted(plain - {0, 1})] = 0.0
        head = model.get_output_embeddings()
        model.set_output_embeddings(torch.nn.Linear(head.in_features, head.out_features))
        model.get_output_embeddings().weight.copy_(head.weight)
        model.get_output_embeddings().bias.copy_(bias)
    return model


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"backend": "portable"},
        {"attention": "custom-kernel"},
        {"prefill_chunk": 3},
        {"separate_decode": True},
    ],
    ids=str,
)
def test_the_official_runner_says_what_transformers_says(family, settings, tmp_path):
    words = tokenizer()
    words.save(str(tmp_path / "tokenizer.json"))
    model = legible(small_model(family, tie_word_embeddings=False), words)
    file = tmp_path / "model.pte"
    export_language_model(model, context=CONTEXT, **settings).save(file)
    wanted = words.decode(greedy(model, words.encode(PROMPT).ids, COUNT))
    assert officially(file, tmp_path) == wanted


@pytest.mark.parametrize("attention", ["delegate", "custom-kernel"])
def test_mixtures_of_experts_say_what_transformers_says(attention, tmp_path):
    import torch
    import transformers

    words = tokenizer()
    words.save(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SMALL, num_local_experts=4)
    model = legible(transformers.MixtralForCausalLM(config).eval(), words)
    file = tmp_path / "model.pte"
    export_language_model(model, context=CONTEXT, attention=attention).save(file)
    wanted = words.decode(greedy(model, words.encode(PROMPT).ids, COUNT))
    assert officially(file, tmp_path) == wanted


@pytest.mark.parametrize(
    "settings",
    [
        {"quantize": "8da4w"},
        {"quantize": "8da4w", "attention": "custom-kernel", "quantize_embedding": 8},
        {"quantize": "8da8w", "quantize_embedding": 4},
        {"quantize": "fp16"},
        {"separate_decode": True},
        {"separate_decode": True, "quantize": "8da4w", "attention": "custom-kernel"},
    ],
    ids=str,
)
def test_quantised_files_are_near_the_quantised_model(settings, tmp_path):
    """Logits of the official runtime beside those of the same weights in eager mode."""
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
    save_folder(tmp_path / "folder")
    made = prepared(tmp_path / "folder", **(asked | settings))
    file = tmp_path / "model.pte"
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
