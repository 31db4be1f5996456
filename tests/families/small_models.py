"""A small model of each family of decoders that transformers knows, with random weights."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""The ``model_type`` of each."""

VOCABULARY = 300
_LARGEST = 20_000_000
_SIZES: dict[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    64: "hidden_size n_embd d_model dim emb_dim embedding_dim hidden_dim word_embed_proj_dim "
    "embedding_size num_mem_blocks",
    96: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size "
    "feed_forward_size intermediate_size_mlp shared_intermediate_size dim_ff",
    32: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank "
    "moe_shared_expert_intermediate_size hidden_size_per_layer_input expert_ffn_hidden_size",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
    "num_key_value_heads num_experts_per_tok moe_topk moe_top_k num_experts_per_token",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads n_routed_experts "
    "encoder_attention_heads num_local_experts num_experts",
    16: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim rotary_dim attention_head_dim "
    "global_head_dim dim_head",
    128: "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx",
    8: "sliding_window window_size sliding_window_size attention_window_size attention_chunk_size "
    "keep_window_size index_topk local_attention local_attention_window_len floor_scale "
    "log_scaling_n_floor",
    1: "n_group topk_group n_shared_experts first_k_dense_replace eos_token_id",
    0: "bos_token_id pad_token_id",
}
_SMALL: dict[str, Any] = {
    **{name: size for size, names in _SIZES.items() for name in names.split()},
    "is_decoder": True,
}
# What a family asks of its settings, found by what it says of others.
_OWN: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "nemotron_h": {"layers_block_type": ["attention", "mlp"]},
    "openai-gpt": {"afn": "gelu"},
}


class NoModelError(Exception):
    """No small model of a family can be made of its configuration's defaults."""


def build(family: str) -> Any:
    """Return a small model, in evaluation mode.

    Args:
        family: One of ``FAMILIES``.

    Raises:
        NoModelError: None was found.
    """
    made = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    why: Exception | None = None
    for settings in _attempts(family):
        torch.manual_seed(0)
        try:
            config = _config(CONFIG_MAPPING[family], settings)
            with torch.device("meta"):
                count = sum(each.numel() for each in made(copy.deepcopy(config)).parameters())
            if count > _LARGEST:
                why = why or ValueError(f"{count:,} weights, and no setting that makes it smaller")
                continue
            model = made(config).eval()
            text = torch.arange(100, 104).unsqueeze(0)
            with torch.no_grad():
                model(input_ids=text, use_cache=False)
        except Exception as error:
            why = why or error
        else:
            return model
    raise NoModelError(f"{type(why).__name__}: {_first_line(why)}")


def _attempts(family: str) -> Iterator[dict[str, Any]]:
    own = {**_SMALL, **_OWN.get(family, {})}
    for heads in (2, 4):
        yield {**own, "num_key_value_heads": heads}
        yield {**_without(own, "head_dim"), "num_key_value_heads": heads}
        yield {**_without(own, "sliding_window"), "num_key_value_heads": heads}
        yield {**_without(own, "num_hidden_layers"), "num_key_value_heads": heads}


def _without(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {known: value for known, value in settings.items() if known != name}


def _config(kind: Any, settings: Mapping[str, Any]) -> Any:
    """Return a configuration with those settings that it knows, and parts likewise."""
    known: set[str] = set()
    for each in kind.__mro__:
        known |= set(getattr(each, "__annotations__", {}))
        if "__init__" in vars(each):
            known |= set(inspect.signature(each.__init__).parameters)
    chosen = {name: value for name, value in settings.items() if name in known}
    for name, part in (getattr(kind, "sub_configs", None) or {}).items():
        if getattr(part, "model_type", "") and name not in chosen:
            chosen[name] = _config(part, settings).to_dict()
    return kind(**chosen)


def _first_line(error: BaseException | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # The first line of a class of checks says which check it was, the second what is wrong.
    told = " ".join(lines[:2]) if lines and "validat" in lines[0] else (lines or [""])[0]
    return re.sub(r"0x[0-9a-f]+", "0x...", told)
