"""Models of transformers with every dimension dynamic, as its own exporter exports them.

``nox -s clients`` does the same for all classes that are listed there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lowerdeck.lowered_module import lower
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import official
from tests.clients.classes import CLIENTS
from tests.clients.run import bounds_of, calls_of, compared, exported_program, facts_of

pytestmark = [
    pytest.mark.skipif(not official.available(), reason=official.REASON),
    pytest.mark.filterwarnings("ignore"),
]
MOST = {
    "BertModel": (2, 12),
    "BigBirdModel": (2, 17),
    "DistilBertModel": (1, 8),
    "GPT2LMHeadModel": (1, 12),
    "GPTNeoXForCausalLM": (1, 13),
    "LlamaForCausalLM": (1, 13),
    "MambaForCausalLM": (1, 10),
    "PhiForCausalLM": (1, 13),
    "SegformerForSemanticSegmentation": (10, 43),
    "T5ForConditionalGeneration": (2, 69),
    "ViTModel": (1, 2),
    "Wav2Vec2ConformerModel": (3, 23),
    "Wav2Vec2Model": (1, 0),
}
"""Delegates, and calls of kernels outside of them."""
QUESTIONS = {"SegformerForSemanticSegmentation": 24, "Wav2Vec2ConformerModel": 9}
"""Questions on symbolic sizes that lowering asks torch, for each node of the program; others 8."""


@pytest.mark.parametrize("name", MOST)
def test_few_delegates_and_kernels_compute_what_eager_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    model, program = exported_program(CLIENTS[name], "dynamic")
    calls = list(calls_of(CLIENTS[name], model, program, "dynamic"))
    assert len(calls) > 1
    questions: Counter[str] = Counter()
    evaluate = ShapeEnv.evaluate_expr

    def counted(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        questions["asked"] += 1
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(ShapeEnv, "evaluate_expr", counted)
    lowered = lower(program, [XnnpackPartitioner()], bounds=bounds_of(program))
    monkeypatch.undo()
    assert questions["asked"] <= QUESTIONS.get(name, 8) * len(program.graph.nodes)
    found: Any = facts_of(lowered.program)
    delegates, kernels = MOST[name]
    assert found["delegates"] <= delegates, found
    assert found["kernels"] <= kernels, found
    assert compared(bytes(lowered.buffer), calls)["outcome"] == "right"
