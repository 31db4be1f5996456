"""Exported decoders give the tokens that transformers gives, or are refused by name."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from folders import FAMILIES, PROMPT, SMALL, greedy, save_folder, saved, small_model, tokenizer
from safetensors.torch import load_file, save_file

from lowerdeck.inspect import ExitStatus
from lowerdeck.language_models import (
    CachedDecoder,
    FolderError,
    LanguageModelError,
    UnsupportedModelError,
    export_language_model,
)
from lowerdeck.runner import load
from lowerdeck.serializer import KernelCall, open_pte
from lowerdeck_zoo import Of

IDS = tokenizer().encode(PROMPT).ids
COUNT = 12
CONTEXT = 48


def tokens_of(program: Any) -> list[int]:
    """Return what a file continues the prompt with in our runner, the end of a text ignored."""
    file = load(program.to_bytes())
    assert file.run("get_max_context_len") == CONTEXT
    chunk, text = int(file.run("get_max_seq_len")), list(IDS)

    def step(start: int, stop: int) -> int:
        alone = stop - start == 1 and "decode" in file.methods
        inputs = torch.tensor([text[start:stop]]), torch.arange(start, stop)
        return int(file.run("decode" if alone else "forward", *inputs)[0, -1].argmax())

    found = [step(start, min(start + chunk, len(IDS))) for start in range(0, len(IDS), chunk)]
    text.append(found[-1])
    while len(text) < len(IDS) + COUNT:
        text.append(step(len(text) - 1, len(text)))
    return text[len(IDS) :]


def checked(shell: Any, folder: Path, file: Path, words: str) -> str:
    """Export a folder with ``--check``, which compares with the same weights in eager."""
    common = ("-o", file, "--context", CONTEXT, "--quiet", "--check", PROMPT)
    return str(shell("lm", "export", folder, *words.split(), *common).out)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_the_tokens_of_transformers(family: str) -> None:
    model = small_model(family)
    program = export_language_model(model, context=CONTEXT)
    assert tokens_of(program) == greedy(model, IDS, COUNT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_folders_of_all_precisions_in_several_files(dtype: torch.dtype, tmp_path: Path) -> None:
    model = save_folder(tmp_path, dtype=dtype, max_shard_size="60kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    program = export_language_model(tmp_path, context=CONTEXT, backend="portable")
    assert tokens_of(program) == greedy(model.float(), IDS, COUNT)


@pytest.mark.parametrize("backend", ["xnnpack", "portable"])
def test_prefill_in_chunks_and_token_by_token_agree(backend: str, llama: Path) -> None:
    first, *others = (
        tokens_of(export_language_model(llama, context=CONTEXT, backend=backend, **settings))
        for settings in ({}, {"prefill_chunk": 3}, {"prefill_chunk": 1}, {"separate_decode": True})
    )
    assert all(other == first for other in others)


_CUSTOM = "--attention custom-kernel"


@pytest.mark.parametrize(
    "words",
    [
        "--quantize fp16",
        "--quantize 8da8w",
        "--quantize 8da4w",
        "--quantize 8da4w --group 64",
        "--quantize-embedding 8",
        "--quantize-embedding 4",
        _CUSTOM,
        f"--quantize 8da4w --quantize-embedding 8 {_CUSTOM}",
        f"--quantize-embedding 8 --backend portable {_CUSTOM}",
        "--separate-decode --backend portable",
        f"--separate-decode --quantize 8da4w {_CUSTOM}",
    ],
)
def test_every_mode_is_near_the_model_with_the_same_weights(
    words: str, llama: Path, tmp_path: Path, shell: Any
) -> None:
    file = tmp_path / "model.pte"
    text = (
        checked(shell, llama, file, words).partition("needs kernels  ")[2].partition(": link")[0]
    )
    kernels = set(text.split(", ")) - {""}
    assert bool(kernels) == ("custom" in words or "embedding" in words)
    with open_pte(file) as opened:
        plan = next(one for one in opened.program().execution_plan if one.name == "forward")
        assert kernels <= {f"{one.name}.{one.overload}" for one in plan.operators}


OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    # Its linear layers are of a class of transformers.
    "GPT2 8da4w": ("GPT2", {}, "--quantize 8da4w"),
    "GPT2 8da8w": ("GPT2", {}, "--quantize 8da8w"),
    "experts": ("Mixtral", {"num_local_experts": 4}, "--quantize 8da4w"),
    "experts, kernel": ("Mixtral", {"num_local_experts": 4}, f"--quantize 8da4w {_CUSTOM}"),
    # One head for all, and keys that are wider than values.
    "Falcon": ("Falcon", {}, ""),
    "DeepseekV3": (
        "DeepseekV3",
        {
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        "",
    ),
    # Its biases are sliced by how many tokens there were.
    "MPT": ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}, ""),
    # Its first token has the position after the padding's.
    "RoBERTa": ("Roberta", {"max_position_embeddings": 80, "is_decoder": True}, ""),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_families_are_near_the_model(case: str, tmp_path: Path, shell: Any) -> None:
    family, settings, words = OTHERS[case]
    saved(small_model(family, **settings), tmp_path / "in")
    text = checked(shell, tmp_path / "in", tmp_path / "model.pte", words)
    if family == "GPT2":
        assert "float: " in text
        assert "linear layers" not in text.partition("float: ")[2]


def test_experts_that_stay_floats_are_reported() -> None:
    model = small_model("Mixtral", num_local_experts=4)
    with pytest.warns(UserWarning, match="8da8w quantised only .*% MixtralExperts"):
        export_language_model(model, context=CONTEXT, quantize="8da8w", prefill_chunk=1)


@pytest.mark.parametrize("quantize", ["none", "8da4w"])
def test_a_separate_decode_shares_weights_and_cache(quantize: str, llama: Path) -> None:
    one, two = (
        export_language_model(llama, context=CONTEXT, quantize=quantize, separate_decode=asked)
        for asked in (False, True)
    )
    assert two.methods[:2] == ("decode", "forward")
    decode, forward = two.program.execution_plan[:2]
    assert decode.non_const_buffer_sizes[2:] == forward.non_const_buffer_sizes[2:]
    assert len(forward.non_const_buffer_sizes) == 3
    weights = sum(tensor.nbytes for tensor in load_file(llama / "model.safetensors").values())
    assert len(two.to_bytes()) - len(one.to_bytes()) < weights / 4
    assert tokens_of(two) == tokens_of(one)


def test_what_runners_ask_is_answered() -> None:
    model = small_model("Llama", eos_token_id=[1, 7])
    file = load(export_language_model(model, context=64, prefill_chunk=16).to_bytes())
    assert {name: file.run(name) for name in file.methods if name != "forward"} == {
        "get_bos_id": 0,
        "get_eos_ids": [1, 7],
        "get_max_seq_len": 16,
        "get_max_context_len": 64,
        "get_vocab_size": 300,
        "get_n_layers": 2,
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
        "use_sdpa_with_kv_cache": False,
    }


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("family", "settings", "context"),
    [
        ("Llama", {}, 128),
        # Positions that change beyond them.
        ("Llama", {"max_position_embeddings": 32, "rope_parameters": DYNAMIC}, 32),
        ("Roberta", {"max_position_embeddings": 34, "pad_token_id": 1, "is_decoder": True}, 32),
        ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 1, "max_seq_len": 32}, 32),
    ],
)
def test_the_context_is_what_the_model_has_positions_for(
    family: str, settings: dict[str, Any], context: int, tmp_path: Path
) -> None:
    model = small_model(family, **settings)
    file = load(export_language_model(model, context=4096).to_bytes())
    assert file.run("get_max_context_len") == context
    text = torch.full((1, context), 5)
    with torch.no_grad():
        wanted = model(text).logits
        found = CachedDecoder(model, context).without_cache(text)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("attention", ["delegate", "custom-kernel"])
def test_no_token_copies_the_cache(attention: str) -> None:
    lowered = export_language_model(small_model(), context=128, attention=attention)
    plan = lowered.program.execution_plan[lowered.methods.index("forward")]
    names = [each.name for each in plan.operators]
    calls = [
        one.instr_args
        for one in plan.chains[0].instructions
        if isinstance(one.instr_args, KernelCall)
    ]
    writer = "llama::update_cache" if attention == "custom-kernel" else "aten::index_put"
    into_cache = [call for call in calls if names[call.op_index] == writer]
    assert len(into_cache) == 4
    for call in into_cache:
        # The state itself is written, in place.
        assert attention == "custom-kernel" or call.args[0] == call.args[-1]
    assert not {"aten::index_copy", "aten::clone", "aten::copy"} & {*names}


def test_the_model_that_is_given_stays_as_it_is() -> None:
    model = small_model()
    before = copy.deepcopy(model)
    export_language_model(
        model, context=32, quantize="8da4w", quantize_embedding=8, attention="custom-kernel"
    )
    assert str(model) == str(before)
    assert model.config.to_dict() == before.config.to_dict()
    for name, value in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert greedy(model, IDS, 4) == greedy(before, IDS, 4)


def test_another_text_begins_at_the_first_position() -> None:
    decoder = CachedDecoder(small_model(), 32)
    positions = torch.arange(len(IDS))
    with torch.no_grad():
        first = decoder(torch.tensor([IDS]), positions)
        decoder(torch.tensor([[5]]), torch.tensor([len(IDS)]))
        again = decoder(torch.tensor([IDS]), positions)
    assert torch.equal(first, again)
    assert torch.equal(positions, torch.arange(len(IDS)))


def test_a_file_with_other_numbers_fails_the_check(
    llama: Path, tmp_path: Path, shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, file = CachedDecoder.without_cache, tmp_path / "model.pte"

    def without_cache(*args: Any) -> torch.Tensor:
        # Only the check comes after the file.
        return real(*args) * (1.5 if file.exists() else 1.0)

    monkeypatch.setattr(CachedDecoder, "without_cache", without_cache)
    words = ("-o", file, "--context", CONTEXT, "--check", PROMPT)
    assert "check failed" in shell("lm", "export", llama, *words, status=ExitStatus.DIFFERS).out


LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
    "original_max_position_embeddings": 16,
}
NEO = {
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
    "max_position_embeddings": 64,
}
ENCODER = "it is an encoder, which does not generate text"
KERNEL = {"attention": "custom-kernel"}


@pytest.mark.parametrize(
    ("family", "config", "settings", "words"),
    [
        ("Llama", {}, {"quantize": "int3"}, "quantize is 'int3'"),
        ("Llama", {}, {"backend": "tpu"}, "backend is 'tpu'"),
        ("Llama", {}, {"attention": "flash"}, "attention is 'flash'"),
        ("Llama", {}, {"quantize_embedding": 3}, "quantize_embedding is 3"),
        ("Llama", {}, {"context": 0}, "expected at least 1"),
        ("Llama", {}, {"prefill_chunk": -1}, "prefill_chunk is -1 tokens, expected at"),
        ("Llama", {}, {"quantize": "8da4w", "group": 33}, "group is 33"),
        ("Llama", {}, {"quantize": "fp16", "backend": "portable"}, "requires backend='xnnpack'"),
        ("Llama", {}, {"quantize": "8da4w", "group": 128}, "has rows that are a multiple of 128"),
        # What a cache or the kernel would compute otherwise.
        ("Mistral", {}, {"context": 48, **KERNEL}, "sliding_window.*a context of at most 8, or"),
        ("Gemma2", {}, {"context": 8, **KERNEL}, "has its own attention"),
        ("Phi3", LONGROPE, {"context": 17}, "longrope.*a context of at most 16"),
        ("GPTNeo", NEO, {"context": 16}, "other logits with a static cache"),
        ("Doge", {"keep_window_size": 8}, {"context": 9}, "keep_window_size.*of at most 8"),
        (
            *("Bloom", {}, {"context": 16, **KERNEL}),
            "other logits with llama::custom_sdpa than without.*leave attention to the delegate",
        ),
        ("Bert", {}, {"context": 5}, ENCODER),
        ("Bert", {}, {"context": 5, **KERNEL}, ENCODER),
        ("Gemma3Text", {"use_bidirectional_attention": True}, {"context": 5}, ENCODER),
        ("Gemma3Text", {"use_bidirectional_attention": True}, {"context": 5, **KERNEL}, ENCODER),
        ("Llama", {"is_causal": False}, {"context": 5}, ENCODER),
        ("Llama", {"is_causal": False}, {"context": 5, **KERNEL}, ENCODER),
        ("Mamba", {"state_size": 8}, {"context": 16}, "mamba"),
    ],
)
def test_what_cannot_be_exported_is_named(
    family: str, config: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(LanguageModelError, match=words):
        export_language_model(small_model(family, **config), **settings)


@pytest.mark.parametrize(
    ("family", "config", "settings"),
    [
        ("Mistral", {}, {"context": 8, **KERNEL}),
        ("Phi3", LONGROPE, {"context": 16}),
        ("Bloom", {}, {"context": 16}),
        # A window of nothing is none.
        ("Qwen2", {"sliding_window": 0}, {"context": 16, **KERNEL}),
    ],
)
def test_what_only_looks_like_it_is_exported(
    family: str, config: dict[str, Any], settings: dict[str, Any]
) -> None:
    export_language_model(small_model(family, **config), **settings)


def test_an_end_that_is_no_token_is_named() -> None:
    model = small_model()
    model.generation_config.eos_token_id = "x"
    with pytest.raises(FolderError, match="eos_token_id of the model's configuration is 'x'"):
        export_language_model(model, context=16)


@pytest.mark.parametrize(
    "lost", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "", "a file"]
)
def test_weights_that_a_folder_lacks_are_named(tmp_path: Path, lost: str) -> None:
    save_folder(tmp_path, max_shard_size="60KB" if lost in ("", "a file") else "1GB")
    file = sorted(tmp_path.glob("model*.safetensors"))[-1]
    weights = load_file(file)
    if lost == "a file":
        file.unlink()
        words = "cannot be loaded"
    else:
        lost = lost or next(iter(weights))
        del weights[lost]
        save_file(weights, file, {"format": "pt"})
        words = f"lacks 1 weights of its model, such as '{lost}'"
    with pytest.raises(FolderError, match=words):
        export_language_model(tmp_path, context=16)


def test_no_code_of_a_folder_runs_and_no_pickle_is_read(tmp_path: Path, llama: Path) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((llama / "config.json").read_text())
    code = f"open({str(tmp_path / 'ran')!r}, 'w')"
    (tmp_path / "own.py").write_text(f"{code}\nclass C: ...\nclass M: ...\n")
    both = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M", "AutoTokenizer": "own.C"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": both}))
    with suppress(LanguageModelError):
        export_language_model(tmp_path, context=16)
    own = config | {"auto_map": both, "model_type": "own_model"}
    (tmp_path / "config.json").write_text(json.dumps(own))
    with pytest.raises(FolderError):
        export_language_model(tmp_path, context=16)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FolderError, match=r"has no \*\.safetensors"):
        export_language_model(tmp_path)


def test_a_graph_that_cannot_be_exported_is_not_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = small_model()
    layer = model.model.layers[0]
    layer.mlp = Of(lambda self, x: self.mlp(x if x.sum() < 1e9 else -x), mlp=layer.mlp)
    with pytest.raises(UnsupportedModelError, match="data-dependent"):
        export_language_model(model, context=CONTEXT)
    assert "def forward" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("BertModel", FolderError, "holds a BertModel, which lacks 6 weights of a model"),
        ("BertForMaskedLM", UnsupportedModelError, ENCODER),
        ("T5Model", UnsupportedModelError, "'t5'"),
    ],
)
def test_folders_of_other_models_are_named(
    kind: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {name: SMALL[name] for name in ("vocab_size", "hidden_size")}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config: Any = transformers.BertConfig(**sizes)
    if kind == "T5Model":
        config = transformers.T5Config(d_model=32, d_kv=8, num_layers=1, num_heads=4, d_ff=64)
    getattr(transformers, kind)(config).save_pretrained(tmp_path)
    with pytest.raises(error, match=words):
        export_language_model(tmp_path, context=16)
