"""Decoders of transformers with a static cache, in the official runtime and the runner."""

from __future__ import annotations

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
    calls = [
        (words[:, first:last], torch.arange(first, last))
        for first, last in ((0, 4), (4, 5), (5, 9))
    ]
    for program in (to_backend(exported, XnnpackPartitioner()), exported):
        data = emit(program).to_bytes()
        outcome = official.run(data, [official.Call(call) for call in calls])
        assert isinstance(outcome, official.Ran), outcome
        found = torch.cat([outputs[0] for outputs in outcome.outputs], 1)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)
    program = load(data, memory="poison")
    found = torch.cat([program.run("forward", *call) for call in calls], 1)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)
