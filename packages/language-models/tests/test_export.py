"""Exported decoders give the tokens that transformers gives."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import (
    FAMILIES,
    PROMPT,
    SMALL,
    greedy,
    save_folder,
    small_model,
    tokenizer,
)
from safetensors.torch import load_file, save_file

from lowerdeck.language_models import (
    CachedDecoder,
    FolderError,
    LanguageModelError,
    UnsupportedModelError,
    export_language_model,
)
from lowerdeck.language_models.checking import check_lines
from lowerdeck.language_models.exporting import lower_decoder, prepared
from lowerdeck.language_models.generating import Timing, generate, open_model
from lowerdeck.runner import load
from lowerdeck.serializer import KernelCall

IDS = tokenizer().encode(PROMPT).ids
COUNT = 12
CONTEXT = 48
DEFAULTS: dict[str, Any] = {
    "quantize": "none",
    "group": 32,
    "quantize_embedding": None,
    "context": CONTEXT,
    "backend": "xnnpack",
    "attention": "delegate",
    "prefill_chunk": None,
    "separate_decode": False,
}


def tokens_of(program: Any, path: Path, prompt: list[int] = IDS) -> list[int]:
    program.save(path)
    found = open_model(path)
    assert found.context == CONTEXT
    # Random weights end no text on purpose.
    endless = type(found)(found.path, found.chunk, found.context, (), found.program)
    return list(generate(endless, prompt, COUNT, official=False, timing=Timing()))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    model = small_model(family)
    program = export_language_model(model, context=CONTEXT)
    assert tokens_of(program, tmp_path / "model.pte") == greedy(model, IDS, COUNT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_folders_of_all_precisions_in_several_files(dtype: torch.dtype, tmp_path: Path) -> None:
    model = save_folder(tmp_path / "in", dtype=dtype, max_shard_size="60kB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    program = export_language_model(tmp_path / "in", context=CONTEXT, backend="portable")
    assert tokens_of(program, tmp_path / "model.pte") == greedy(model.float(), IDS, COUNT)


@pytest.mark.parametrize("backend", ["xnnpack", "portable"])
def test_prefill_at_once_in_chunks_and_token_by_token_agree(
    backend: str, llama: Path, tmp_path: Path
) -> None:
    found = [
        tokens_of(
            export_language_model(llama, context=CONTEXT, backend=backend, prefill_chunk=chunk),
            tmp_path / "model.pte",
        )
        for chunk in (None, 3, 1)
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    "settings",
    [
        {"quantize": "fp16"},
        {"quantize": "8da8w"},
        {"quantize": "8da4w"},
        {"quantize": "8da4w", "group": 64},
        {"quantize_embedding": 8},
        {"quantize_embedding": 4},
        {"attention": "custom-kernel"},
        {"quantize": "8da4w", "quantize_embedding": 8, "attention": "custom-kernel"},
        {"quantize_embedding": 8, "backend": "portable", "attention": "custom-kernel"},
        {"separate_decode": True},
        {"separate_decode": True, "backend": "portable"},
        {"separate_decode": True, "quantize": "8da4w", "attention": "custom-kernel"},
    ],
    ids=str,
)
def test_every_mode_is_near_the_model_with_the_same_weights(
    settings: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    made = prepared(llama, **(DEFAULTS | settings))
    lowered = lower_decoder(made)
    lowered.save(tmp_path / "model.pte")
    alike, lines = check_lines(made.decoder, open_model(tmp_path / "model.pte"), IDS)
    assert alike, lines
    kernels = {f"{each.name}.{each.overload}" for each in operators(lowered)}
    assert made.kernels <= kernels


@pytest.mark.parametrize("quantize", ["8da4w", "8da8w"])
def test_gpt2_is_quantised(quantize: str, tmp_path: Path) -> None:
    # Its linear layers are of a class of transformers.
    made = prepared(small_model("GPT2"), **(DEFAULTS | {"quantize": quantize}))
    assert made.quantized is not None
    assert list(made.quantized.left) == ["embeddings"]
    lower_decoder(made).save(tmp_path / "model.pte")
    alike, lines = check_lines(made.decoder, open_model(tmp_path / "model.pte"), IDS)
    assert alike, lines


def mixture() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SMALL, num_local_experts=4)
    return transformers.MixtralForCausalLM(config).eval()


@pytest.mark.parametrize("backend", ["xnnpack", "portable"])
def test_scales_of_groups_are_those_that_the_delegate_keeps(backend: str, llama: Path) -> None:
    # Other scales choose other experts of a mixture, now and then.
    made = prepared(llama, **(DEFAULTS | {"quantize": "8da4w", "backend": backend}))
    scales = [
        held
        for name, held in made.decoder.named_parameters()
        if "parametrizations" in name and held.is_floating_point()
    ]
    assert scales
    assert all(torch.equal(one, one.bfloat16().float()) for one in scales) == (
        backend == "xnnpack"
    )


@pytest.mark.parametrize("attention", ["delegate", "custom-kernel"])
def test_quantised_mixtures_of_experts_are_near_the_quantised_model(
    attention: str, tmp_path: Path
) -> None:
    made = prepared(mixture(), **(DEFAULTS | {"quantize": "8da4w", "attention": attention}))
    lower_decoder(made).save(tmp_path / "model.pte")
    alike, lines = check_lines(made.decoder, open_model(tmp_path / "model.pte"), IDS)
    assert alike, lines


def test_experts_that_stay_floats_are_told() -> None:
    model = mixture()
    with pytest.warns(UserWarning, match="8da8w quantised only .* of MixtralExperts"):
        export_language_model(model, context=CONTEXT, quantize="8da8w", prefill_chunk=1)


def operators(lowered: Any) -> Any:
    return lowered.program.execution_plan[lowered.methods.index("forward")].operators


@pytest.mark.parametrize("quantize", ["none", "8da4w"])
def test_a_separate_decode_shares_weights_and_cache(
    quantize: str, llama: Path, tmp_path: Path
) -> None:
    one, two = (
        export_language_model(llama, context=CONTEXT, quantize=quantize, separate_decode=asked)
        for asked in (False, True)
    )
    assert two.methods[:2] == ("decode", "forward")
    decode, forward = two.program.execution_plan[:2]
    assert decode.non_const_buffer_sizes[2:] == forward.non_const_buffer_sizes[2:]
    assert len(forward.non_const_buffer_sizes) == 3
    weights = sum(tensor.nbytes for tensor in load_file(llama / "model.safetensors").values())
    one.save(tmp_path / "one.pte")
    two.save(tmp_path / "two.pte")
    more = (tmp_path / "two.pte").stat().st_size - (tmp_path / "one.pte").stat().st_size
    assert more < weights / 4
    assert tokens_of(two, tmp_path / "two.pte") == tokens_of(one, tmp_path / "one.pte")


def test_what_runners_ask_is_said() -> None:
    model = small_model("Llama", eos_token_id=[1, 7])
    program = export_language_model(model, context=64, prefill_chunk=16)
    file = load(program.to_bytes())
    said = {name: file.run(name) for name in file.methods if name != "forward"}
    assert said == {
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


def test_a_context_beyond_what_the_model_was_made_for_is_cut() -> None:
    file = load(export_language_model(small_model(), context=4096).to_bytes())
    assert file.run("get_max_context_len") == 128


@pytest.mark.parametrize("attention", ["delegate", "custom-kernel"])
def test_no_token_copies_the_cache(attention: str) -> None:
    context = 128
    lowered = export_language_model(small_model(), context=context, attention=attention)
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
        # What is written is what was read: the state itself, in place.
        assert attention == "custom-kernel" or call.args[0] == call.args[-1]
    assert not {"aten::index_copy", "aten::clone"} & {*names}
    assert "aten::copy" not in names


def test_the_model_that_is_given_stays_as_it_is() -> None:
    model = small_model()
    before = copy.deepcopy(model)
    export_language_model(
        model, context=32, quantize="8da4w", quantize_embedding=8, attention="custom-kernel"
    )
    assert str(model) == str(before)
    assert model.config.to_dict() == before.config.to_dict()
    for (name, one), (_, other) in zip(
        model.state_dict().items(), before.state_dict().items(), strict=True
    ):
        assert torch.equal(one, other), name
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


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantize": "int3"}, "quantize is 'int3'"),
        ({"backend": "tpu"}, "backend is 'tpu'"),
        ({"attention": "flash"}, "attention is 'flash'"),
        ({"quantize_embedding": 3}, "quantize_embedding is 3"),
        ({"context": 0}, "give at least 1"),
        ({"prefill_chunk": -1}, "prefill_chunk -1 is a number of tokens: give at least 1"),
        ({"quantize": "8da4w", "group": 33}, "group is 33"),
        ({"quantize": "fp16", "backend": "portable"}, "XNNPACK's delegate stores weights in"),
        ({"quantize": "8da4w", "group": 128}, "no linear layer has rows of a multiple of 128"),
    ],
)
def test_arguments_that_make_no_sense_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(LanguageModelError, match=words):
        export_language_model(small_model(intermediate_size=96), **settings)


def test_attention_that_the_custom_kernel_does_not_compute_is_named() -> None:
    model = small_model("Mistral")
    with pytest.raises(
        UnsupportedModelError, match=r"sliding_window.*a context of at most 8, or leave attention"
    ):
        export_language_model(model, context=48, attention="custom-kernel")
    export_language_model(model, context=8, attention="custom-kernel")
    with pytest.raises(UnsupportedModelError, match="in its own way"):
        export_language_model(small_model("Gemma2"), context=8, attention="custom-kernel")


def test_positions_that_change_in_the_middle_of_a_text_are_named() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    first = {"original_max_position_embeddings": 16}
    model = small_model("Phi3", rope_parameters={**rope, **first}, **first)
    with pytest.raises(UnsupportedModelError, match=r"longrope.*a context of at most 16"):
        export_language_model(model, context=17)
    export_language_model(model, context=16)


def test_a_window_of_nothing_is_none() -> None:
    model = small_model("Qwen2", sliding_window=0)
    export_language_model(model, context=16, attention="custom-kernel")


def test_an_end_that_is_no_token_is_named() -> None:
    model = small_model()
    model.generation_config.eos_token_id = "x"
    with pytest.raises(FolderError, match="eos_token_id of the model's configuration is 'x'"):
        export_language_model(model, context=16)


def test_folders_that_are_none_are_named(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(FolderError, match=r"has no config\.json"):
        export_language_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(FolderError, match="no model that the installed transformers knows"):
        export_language_model(tmp_path)
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(FolderError, match=r"has no \*\.safetensors"):
        export_language_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(FolderError, match="cannot be loaded"):
        export_language_model(tmp_path)


def test_a_folder_that_lacks_weights_is_named(tmp_path: Path) -> None:
    save_folder(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    whole, less = shards[-1].read_bytes(), load_file(shards[-1])
    shards[-1].unlink()
    with pytest.raises(FolderError, match="cannot be loaded"):
        export_language_model(tmp_path, context=16)
    shards[-1].write_bytes(whole)
    less.popitem()
    save_file(less, shards[-1], {"format": "pt"})
    with pytest.raises(FolderError, match="lacks 1 weights"):
        export_language_model(tmp_path, context=16)


@pytest.mark.parametrize(
    "lost", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"]
)
def test_weights_that_a_file_lacks_are_named(tmp_path: Path, lost: str) -> None:
    save_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights[lost]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(FolderError, match=f"lacks 1 weights of its model, such as '{lost}'"):
        export_language_model(tmp_path, context=16)


def test_no_code_of_a_folder_runs(tmp_path: Path, llama: Path) -> None:
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


def test_pickled_weights_are_not_read(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(FolderError, match=r"has no \*\.safetensors"):
        export_language_model(tmp_path)


def of_other_heads(family: str) -> Any:
    import transformers

    torch.manual_seed(0)
    small = {
        "vocab_size": 300,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if family == "Falcon":
        return transformers.FalconForCausalLM(transformers.FalconConfig(**small)).eval()
    parts = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    more = {"intermediate_size": 96, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    config = transformers.DeepseekV3Config(
        **small, **parts, **experts, **more, v_head_dim=8, num_key_value_heads=4
    )
    return transformers.DeepseekV3ForCausalLM(config).eval()


@pytest.mark.parametrize("family", ["Falcon", "DeepseekV3"])
def test_keys_and_values_may_have_other_sizes_than_configurations_name(
    family: str, tmp_path: Path
) -> None:
    # One head for all, and keys that are wider than values.
    made = prepared(of_other_heads(family), **DEFAULTS)
    lower_decoder(made).save(tmp_path / "model.pte")
    alike, lines = check_lines(made.decoder, open_model(tmp_path / "model.pte"), IDS)
    assert alike, lines


def of_own_positions(family: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if family == "MPT":
        # Its biases are sliced by how many tokens there were.
        config = transformers.MptConfig(
            vocab_size=300, d_model=64, n_heads=4, n_layers=2, max_seq_len=64
        )
        return transformers.MptForCausalLM(config).eval()
    # Its first token has the position after the padding's.
    config = transformers.RobertaConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=80,
        is_decoder=True,
    )
    return transformers.RobertaForCausalLM(config).eval()


@pytest.mark.parametrize("family", ["MPT", "RoBERTa"])
def test_families_may_count_positions_in_their_own_way(family: str, tmp_path: Path) -> None:
    made = prepared(of_own_positions(family), **DEFAULTS)
    lower_decoder(made).save(tmp_path / "model.pte")
    alike, lines = check_lines(made.decoder, open_model(tmp_path / "model.pte"), IDS)
    assert alike, lines


def test_a_family_that_computes_something_else_with_a_cache_is_refused() -> None:
    import transformers

    # Its windows count from the end of the cache.
    config = transformers.GPTNeoConfig(
        vocab_size=50,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = transformers.GPTNeoForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match="something else with a static cache"):
        export_language_model(model, context=16)


def test_a_file_that_says_something_else_fails_the_check(llama: Path, tmp_path: Path) -> None:
    made = prepared(llama, **DEFAULTS)
    lower_decoder(made).save(tmp_path / "model.pte")
    with torch.no_grad():
        for weight in made.decoder.parameters():
            weight.mul_(1.5)
    alike, lines = check_lines(made.decoder, open_model(tmp_path / "model.pte"), IDS)
    assert not alike, lines
    assert lines[-1].startswith("check failed")


def test_positions_that_change_beyond_the_context_are_exported(tmp_path: Path) -> None:
    import transformers

    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    sizes = SMALL | {"max_position_embeddings": 32}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope)
    model = transformers.LlamaForCausalLM(config).eval()
    made = prepared(model, **(DEFAULTS | {"context": 64}))
    assert made.context == 32
    lower_decoder(made).save(tmp_path / "model.pte")
    alike, lines = check_lines(made.decoder, open_model(tmp_path / "model.pte"), IDS)
    assert alike, lines
    text = torch.arange(32).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(made.decoder.without_cache(text), model(text).logits)


def test_a_graph_that_cannot_be_exported_is_not_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = prepared(small_model("GPT2"), **DEFAULTS)
    monkeypatch.setattr(
        type(made.decoder), "_start", lambda _, tokens, at: int(bool(at.max() > tokens.shape[1]))
    )
    with pytest.raises(UnsupportedModelError, match="data-dependent"):
        lower_decoder(made)
    assert "def forward" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Roberta", {"max_position_embeddings": 32, "pad_token_id": 1, "is_decoder": True}),
        ("Mpt", {"max_seq_len": 30}),
    ],
)
def test_the_context_is_what_the_model_has_positions_for(
    family: str, settings: dict[str, Any]
) -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "d_model": 32}
    sizes |= {"n_heads": 4, "n_layers": 1, "intermediate_size": 64, "vocab_size": 64}
    config = getattr(transformers, f"{family}Config")(**sizes, **settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    made = prepared(model, **(DEFAULTS | {"context": 2048}))
    assert made.context == 30
    with torch.no_grad():
        made.decoder.without_cache(torch.full((1, 30), 5))


def test_models_that_are_no_decoders_with_keys_and_values_are_named(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    bert = transformers.T5Config(
        d_model=32, d_kv=8, num_layers=1, num_heads=4, d_ff=64, vocab_size=50
    )
    transformers.T5Model(bert).save_pretrained(tmp_path / "t5")
    with pytest.raises(UnsupportedModelError, match="'t5'"):
        export_language_model(tmp_path / "t5")
    mamba = transformers.MambaConfig(
        hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=50
    )
    with pytest.raises(UnsupportedModelError, match="mamba"):
        export_language_model(transformers.MambaForCausalLM(mamba), context=16)


def test_encoders_are_named(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "bare")
    with pytest.raises(FolderError, match="holds a BertModel, which lacks 6 weights of a model"):
        export_language_model(tmp_path / "bare", context=16)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "masked")
    with pytest.raises(UnsupportedModelError, match="it is an encoder, and generates no text"):
        export_language_model(tmp_path / "masked", context=16)


@pytest.mark.parametrize("attention", ["delegate", "custom-kernel"])
@pytest.mark.parametrize("kind", ["bert", "gemma3", "llama"])
def test_attention_to_what_follows_is_named(kind: str, attention: str) -> None:
    # The kernel is causal: compared with itself, such a model is right.
    import transformers

    torch.manual_seed(0)
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
        )
        model = transformers.BertLMHeadModel(config).eval()
    elif kind == "gemma3":
        model = small_model("Gemma3Text", use_bidirectional_attention=True)
    else:
        model = small_model(is_causal=False)
    with pytest.raises(UnsupportedModelError, match="it is an encoder, and generates no text"):
        export_language_model(model, context=5, attention=attention)


def test_a_choice_among_what_was_kept_is_named() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.DogeConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        keep_window_size=8,
    )
    model = transformers.DogeForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match=r"keep_window_size.*a context of at most 8"):
        export_language_model(model, context=9)


def test_attention_with_biases_of_its_own_is_left_to_the_delegate() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=300, hidden_size=32, n_layer=1, n_head=2)
    model = transformers.BloomForCausalLM(config).eval()
    words = r"something else with llama::custom_sdpa than without.*leave attention to the delegate"
    with pytest.raises(UnsupportedModelError, match=words):
        export_language_model(model, context=16, attention="custom-kernel")
    export_language_model(model, context=16)
