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
    from folders import FAMILIES, PROMPT, greedy, lowerdeck, small_model, tokenizer

    from lowerdeck.language_models import export_language_model

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


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {}),
        ("Qwen3", {}),
        ("Llama", {"backend": "portable"}),
        ("Qwen3", {"attention": "custom-kernel"}),
        ("Llama", {"prefill_chunk": 3}),
        ("Qwen3", {"separate_decode": True}),
        ("Mixtral", {"attention": "delegate"}),
        ("Mixtral", {"attention": "custom-kernel"}),
        *(pytest.param(family, {}, marks=pytest.mark.heavy) for family in FAMILIES),
    ],
    ids=str,
)
def test_the_official_runner_says_what_transformers_says(family, settings, tmp_path):
    words = tokenizer()
    words.save(str(tmp_path / "tokenizer.json"))
    more = {"num_local_experts": 4} if family == "Mixtral" else {"tie_word_embeddings": False}
    model = legible(small_model(family, **more), words)
    file = tmp_path / "model.pte"
    export_language_model(model, context=CONTEXT, **settings).save(file)
    wanted = words.decode(greedy(model, words.encode(PROMPT).ids, COUNT))
    assert officially(file, tmp_path) == wanted


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {"quantize": "8da4w"}),
        (
            "Llama",
            {"quantize": "8da4w", "attention": "custom-kernel", "quantize_embedding": 8},
        ),
        ("Llama", {"quantize": "8da8w", "quantize_embedding": 4}),
        ("Llama", {"quantize": "fp16"}),
        ("Llama", {"separate_decode": True, "quantize": "8da4w", "attention": "custom-kernel"}),
        ("Mixtral", {"quantize": "8da4w"}),
        ("Mixtral", {"quantize": "8da8w", "attention": "custom-kernel"}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:8da8w quantised only:UserWarning")
def test_quantised_files_say_in_the_official_runtime_what_they_say_in_ours(
    family, settings, tmp_path, capsys
):
    """The package's own suite holds our runner to the model with the same weights."""
    tokenizer().save(str(tmp_path / "model.tokenizer.json"))
    model = small_model(family, **({"num_local_experts": 4} if family == "Mixtral" else {}))
    file = tmp_path / "model.pte"
    export_language_model(model, context=CONTEXT, **settings).save(file)
    texts = {}
    for runtime in ("official", "lowerdeck"):
        assert lowerdeck("lm", "run", file, PROMPT, "--tokens", 8, "--runtime", runtime) == 0
        texts[runtime], _, told = capsys.readouterr().out.rstrip("\n").rpartition("\n")
        assert runtime in told
    assert texts["official"] == texts["lowerdeck"]
