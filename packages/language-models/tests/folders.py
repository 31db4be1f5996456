"""Small model folders, as ``save_pretrained`` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PROMPT = "the quick brown fox"
VOCABULARY = 300

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma": {},
    "Gemma2": {"sliding_window": 8},
    "Gemma3Text": {"sliding_window": 8},
    "Mistral": {"sliding_window": 8},
    "Phi3": {},
    "Olmo2": {},
    "Granite": {},
    "StableLm": {},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "SmolLM3": {},
}
"""Families of decoders, with what their configurations want besides."""


_SIZES = {name: SMALL[name] for name in tuple(SMALL)[:5]}
_CLASSES = {
    "Bert": "BertLMHeadModel",
    "Gemma3Text": "Gemma3ForCausalLM",
    "GPT2": "GPT2LMHeadModel",
}


def small_model(family: str = "Llama", **settings: Any) -> Any:
    """Return a decoder with random weights, of ``FAMILIES`` or any other family."""
    torch.manual_seed(0)
    known = {"num_key_value_heads": 4} if family == "GPT2" else {}
    sizes = SMALL if family in (*FAMILIES, "Mixtral", "Doge") else _SIZES
    config = getattr(transformers, f"{family}Config")(
        **{**sizes, **known, **FAMILIES.get(family, {}), **settings}
    )
    return getattr(transformers, _CLASSES.get(family, f"{family}ForCausalLM"))(config).eval()


def tokenizer(*texts: str) -> Any:
    """Return a small byte-level tokenizer, which has the letters of given texts alone."""
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=[] if texts else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts or [f"{PROMPT} jumps over the lazy dog " * 20], trainer)
    return made


def save_folder(
    folder: Path, family: str = "Llama", dtype: torch.dtype = torch.float32, **saving: Any
) -> Any:
    """Write the folder of a small model; return the model."""
    return saved(small_model(family).to(dtype), folder, **saving)


def saved(model: Any, folder: Path, **saving: Any) -> Any:
    """Write the folder of a model; return the model."""
    model.save_pretrained(folder, **saving)
    tokenizer().save(str(folder / "tokenizer.json"))
    return model


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return what transformers itself continues a text with."""
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens
