"""A small model of each family of decoders that transformers knows, with random weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lowerdeck_zoo.models.small_configs import SMALL_SIZES, small_config

FAMILIES: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""The ``model_type`` of each."""

_LARGEST = 20_000_000
_SMALL = {**SMALL_SIZES, "is_decoder": True}
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
            config = small_config(CONFIG_MAPPING[family], settings)
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


def _first_line(error: BaseException | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # The first line of a class of checks says which check it was, the second what is wrong.
    told = " ".join(lines[:2]) if lines and "validat" in lines[0] else (lines or [""])[0]
    return re.sub(r"0x[0-9a-f]+", "0x...", told)
