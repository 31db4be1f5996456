"""Hugging Face models from config: emitted, run in the official runtime, equal to eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowerdeck.emitter import emit
from tests.interop import official

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}


class Logits(nn.Module):
    """The first output of a model, without a cache, so that inputs and outputs are tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, use_cache=False, return_dict=False)[0]


class Encoded(nn.Module):
    """The first output of an encoder."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, return_dict=False)[0]


def _bert() -> nn.Module:
    return Encoded(transformers.BertModel(transformers.BertConfig(**SMALL)))


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64)
    return Logits(transformers.GPT2LMHeadModel(config))


def _llama() -> nn.Module:
    return Logits(transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)))


def _qwen() -> nn.Module:
    config = transformers.Qwen3Config(**GROUPED, head_dim=8)
    return Logits(transformers.Qwen3ForCausalLM(config))


def _mistral() -> nn.Module:
    return Logits(transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED)))


@pytest.mark.parametrize("build", [_bert, _gpt2, _llama, _qwen, _mistral])
def test_model_from_config_equals_eager(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = build().eval()
    calls = [(torch.randint(0, 99, (1, 11)),) for _ in range(2)]
    with torch.no_grad():
        program = torch.export.export(module, calls[0])
        expected = [module(*call) for call in calls]
    outcome = official.run(emit(program).to_bytes(), [official.Call(call) for call in calls])
    assert isinstance(outcome, official.Ran), outcome
    for outputs, wanted in zip(outcome.outputs, expected, strict=True):
        torch.testing.assert_close(outputs[0], wanted, atol=1e-4, rtol=1e-3)
