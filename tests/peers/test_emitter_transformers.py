"""Decoders of transformers with a static cache, in the official runtime and the runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.runner import load
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import official
from lowerdeck_zoo.models.transformers_small import GROUPED, WIDE

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

# What users of ExecuTorch export: a decoder whose cache is state, for any number of tokens a call.
CACHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", GROUPED),
    "Mixtral": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "Gemma3": ("Gemma3TextConfig", {**WIDE, "sliding_window": 4}),
}
_LENGTH = 16


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("Llama", "Mixtral") else pytest.mark.heavy)
        for name in CACHED
    ],
)
def test_a_static_cache_is_filled_call_by_call(name: str) -> None:
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    torch.manual_seed(0)
    config, settings = CACHED[name]
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config)(**settings))
    model.eval().generation_config = transformers.GenerationConfig(
        use_cache=True,
        cache_implementation="static",
        max_length=_LENGTH,
        cache_config={"batch_size": 1, "max_cache_len": _LENGTH, "device": "cpu"},
        pad_token_id=0,
    )
    words = torch.randint(3, 99, (1, 9))
    length = torch.export.Dim("length", max=_LENGTH - 1)
    with torch.no_grad():
        module = TorchExportableModuleForDecoderOnlyLM(
            model, batch_size=1, max_cache_len=_LENGTH, device="cpu"
        )
        exported = module.export(
            input_ids=words[:, :3],
            cache_position=torch.arange(3),
            dynamic_shapes={"input_ids": {1: length}, "cache_position": {0: length}},
        )
        wanted = model(input_ids=words, use_cache=False).logits
    data = emit(exported).to_bytes()
    calls = [
        (words[:, first:last], torch.arange(first, last))
        for first, last in ((0, 4), (4, 5), (5, 9))
    ]
    outcome = official.run(data, [official.Call(call) for call in calls])
    assert isinstance(outcome, official.Ran), outcome
    found = torch.cat([outputs[0] for outputs in outcome.outputs], 1)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)
    program = load(data, memory="poison")
    found = torch.cat([program.run("forward", *call) for call in calls], 1)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)


def test_a_decoder_with_a_static_cache_decodes_token_by_token(tmp_path: Path) -> None:
    integration = pytest.importorskip("transformers.integrations.executorch")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    longest = 32
    model.generation_config.use_cache = True
    model.generation_config.cache_implementation = "static"
    model.generation_config.cache_config = {"batch_size": 1, "max_cache_len": longest}
    wrap = integration.TorchExportableModuleForDecoderOnlyLM
    wrapped = wrap(model, batch_size=1, max_cache_len=longest)
    sizes = {1: torch.export.Dim("seq", min=1, max=longest - 1)}
    program = wrapped.export(
        input_ids=torch.tensor([[1, 2, 3]]),
        cache_position=torch.arange(3),
        dynamic_shapes={"input_ids": sizes, "cache_position": {0: sizes[1]}},
        strict=False,
    )
    tokens = [5, 9, 17, 3]
    with torch.no_grad():
        forward = transformers.LlamaForCausalLM.forward
        wanted = forward(model, torch.tensor([tokens]), use_cache=False).logits[0]
    steps = [(torch.tensor([tokens[:2]]), torch.arange(2))]
    steps += [(torch.tensor([[tokens[i]]]), torch.tensor([i])) for i in (2, 3)]
    for lowered in (program, to_backend(program, XnnpackPartitioner())):
        path = tmp_path / "model.pte"
        emit(lowered).save(path)
        outcome = official.run(path, [official.Call(step) for step in steps])
        assert isinstance(outcome, official.Ran), outcome
        for (_, positions), (logits,) in zip(steps, outcome.outputs, strict=True):
            torch.testing.assert_close(logits[0, -1], wanted[int(positions[-1])])
