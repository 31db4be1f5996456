"""Configurations of Hugging Face transformers with small numbers, whatever a family calls them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

_SIZES: dict[int, str] = {
    300: "vocab_size vocab_size_per_layer_input",
    64: "hidden_size n_embd d_model dim emb_dim embedding_dim hidden_dim word_embed_proj_dim "
    "embedding_size num_mem_blocks",
    96: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size "
    "feed_forward_size intermediate_size_mlp shared_intermediate_size dim_ff",
    32: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank "
    "moe_shared_expert_intermediate_size hidden_size_per_layer_input expert_ffn_hidden_size "
    "image_size",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
    "num_key_value_heads num_experts_per_tok moe_topk moe_top_k num_experts_per_token",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads n_routed_experts "
    "encoder_attention_heads num_local_experts num_experts num_frames",
    16: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim rotary_dim attention_head_dim "
    "global_head_dim dim_head num_mel_bins",
    128: "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx",
    8: "sliding_window window_size sliding_window_size attention_window_size attention_chunk_size "
    "keep_window_size index_topk local_attention local_attention_window_len floor_scale "
    "log_scaling_n_floor patch_size",
    1: "n_group topk_group n_shared_experts first_k_dense_replace eos_token_id",
    0: "bos_token_id pad_token_id",
}
SMALL_SIZES: dict[str, Any] = {
    name: size for size, names in _SIZES.items() for name in names.split()
}
"""Small numbers for settings of configurations, by the settings' names."""


def small_config(kind: Any, settings: Mapping[str, Any]) -> Any:
    """Return a configuration with those settings that it knows, and parts likewise."""
    known: set[str] = set()
    for each in kind.__mro__:
        known |= set(getattr(each, "__annotations__", {}))
        if "__init__" in vars(each):
            known |= set(inspect.signature(each.__init__).parameters)
    chosen = {name: value for name, value in settings.items() if name in known}
    for name, part in (getattr(kind, "sub_configs", None) or {}).items():
        if getattr(part, "model_type", "") and name not in chosen:
            chosen[name] = small_config(part, settings).to_dict()
    return kind(**chosen)
