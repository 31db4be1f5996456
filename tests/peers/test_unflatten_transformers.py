"""Language models of Hugging Face ``transformers``, made from configurations, in both modes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from lowerdeck.unflatten import unflatten  # noqa: E402

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": _SMALL,
    "qwen3": _SMALL,
    "gemma2": _SMALL,
    "mistral": _SMALL,
    "phi3": _SMALL,
    "gpt_neox": {**_SMALL, "rotary_pct": 0.5},
    "bert": _SMALL,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "vocab_size": 64},
}
# Where the decoder's layers stand, for signatures to preserve.
_LAYERS = {
    "llama": "model.layers.0",
    "qwen3": "model.layers.1.mlp",
    "gemma2": "model.layers.0.self_attn",
    "mistral": "model.layers.1",
    "phi3": "model.layers.0.mlp",
    "gpt_neox": "gpt_neox.layers.0.mlp",
    "bert": "encoder.layer.0",
    "gpt2": "transformer.h.0.mlp",
    "t5": "encoder.block.0",
}


def _model(name: str) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **_MODELS[name])
    if name == "bert":
        made = transformers.AutoModel.from_config(config)
    elif name == "t5":
        made = transformers.T5ForConditionalGeneration(config)
    else:
        made = transformers.AutoModelForCausalLM.from_config(config)
    return made.eval()


def _inputs(name: str) -> dict[str, Any]:
    ids = torch.arange(1, 9).reshape(1, 8)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "t5":
        inputs["decoder_input_ids"] = ids[:, :4]
    if name != "bert":
        inputs["use_cache"] = False
    return inputs


def _logits(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else next(iter(result.values()))


@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", _MODELS)
def test_model(name: str, strict: bool, preserve: bool) -> None:
    model, inputs = _model(name), _inputs(name)
    layer = _LAYERS[name]
    options: dict[str, Any] = {"preserve_module_call_signature": (layer,)} if preserve else {}
    subject = copy.deepcopy(model)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(subject, (), inputs, strict=strict, **options)
        except Exception as error:
            pytest.skip(f"torch.export cannot export it: {type(error).__name__}: {error}"[:300])
        expected = _logits(model(**inputs))
        module = unflatten(program)
        for _ in range(2):
            torch.testing.assert_close(_logits(module(**inputs)), expected)
        assert list(module.state_dict()) == list(model.state_dict())
        mine = {key for key, _ in module.named_modules(remove_duplicate=False)}
        assert mine == {key for key, _ in model.named_modules(remove_duplicate=False)}
        if preserve:
            parent, _, last = layer.rpartition(".")
            setattr(module.get_submodule(parent), last, model.get_submodule(layer))
            torch.testing.assert_close(_logits(module(**inputs)), expected)
