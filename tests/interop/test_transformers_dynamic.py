"""Models of transformers with every dimension dynamic, as its own exporter exports them.

``nox -s clients`` does the same for all classes that are listed there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import lower, to_backend
from lowerdeck.serializer import deserialize_pte
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Of, official
from lowerdeck_zoo.models.language import Llama
from tests.clients.classes import CLIENTS
from tests.clients.run import bounds_of, calls_of, compared, exported_program, facts_of

pytestmark = [
    pytest.mark.skipif(not official.available(), reason=official.REASON),
    pytest.mark.filterwarnings("ignore"),
]
MOST = {
    "BertModel": (1, 11),
    "BigBirdModel": (1, 16),
    "BloomForCausalLM": (1, 16),
    "DistilBertModel": (1, 8),
    "EfficientNetModel": (1, 0),
    "GPT2LMHeadModel": (1, 12),
    "GPTNeoXForCausalLM": (1, 13),
    "JetMoeForCausalLM": (15, 101),
    "LlamaForCausalLM": (1, 13),
    "LlavaForConditionalGeneration": (2, 16),
    "MPNetModel": (1, 27),
    "MambaForCausalLM": (1, 10),
    "PhiForCausalLM": (1, 13),
    "PvtModel": (5, 28),
    "SegformerForSemanticSegmentation": (7, 26),
    "T5ForConditionalGeneration": (1, 33),
    "ViTModel": (1, 2),
    "Wav2Vec2ConformerModel": (3, 23),
    "Wav2Vec2Model": (1, 0),
    "XGLMForCausalLM": (1, 16),
}
"""Delegates, and calls of kernels outside of them."""
QUESTIONS = 2.2
"""Questions on symbolic sizes that lowering asks torch, at most, for each node of a program."""


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
    assert questions["asked"] <= QUESTIONS * len(program.graph.nodes), questions
    found: Any = facts_of(lowered.program)
    delegates, kernels = MOST[name]
    assert found["delegates"] <= delegates, found
    assert found["kernels"] <= kernels, found
    assert compared(bytes(lowered.buffer), calls)["outcome"] == "right"


PACKED = {
    "GPT2LMHeadModel": 9,
    "LlamaForCausalLM": 9,
    "MistralForCausalLM": 13,
    "Qwen2ForCausalLM": 9,
}
"""Calls of kernels outside of the delegate."""


@pytest.mark.parametrize("name", PACKED)
def test_positions_are_not_searched_for_packed_sequences(name: str) -> None:
    """transformers does so where it is given no mask, by the distances between positions."""
    pytest.importorskip("transformers")
    model = CLIENTS[name].model()
    forward = Of(lambda m, ids: m.body(ids, use_cache=False).logits, body=model).eval()
    tokens = [torch.randint(3, 300, sizes) for sizes in ((2, 16), (1, 5), (3, 1), (8, 64))]
    dims = (({0: Dim.AUTO(max=8), 1: Dim.AUTO(max=64)},),)
    program = torch.export.export(forward, (tokens[0],), dynamic_shapes=dims)
    for data in (
        bytes(lower(program, [XnnpackPartitioner()]).buffer),
        emit(to_backend(program, XnnpackPartitioner())).to_bytes(),
    ):
        found: Any = facts_of(deserialize_pte(data))
        assert found["delegates"] == 1, found
        assert found["kernels"] <= PACKED[name], found
        calls = [([ids], [forward(ids).detach()]) for ids in tokens]
        assert compared(data, calls)["outcome"] == "right"


class Windows(nn.Module):
    """Adds attention in windows of 4 x 4 pixels to an image, then in shifted ones, as Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, image: Tensor) -> Tensor:
        batch, _, height, width = image.shape
        tokens = image.flatten(2).transpose(1, 2)
        for layer, shift in zip(self.layers, (0, 2), strict=True):
            x = self.norm(tokens).view(batch, height, width, 8)
            x = nn.functional.pad(x, (0, 0, 0, (4 - width % 4) % 4, 0, (4 - height % 4) % 4))
            high, wide = x.shape[1:3]
            x = self._partitioned(x.roll((-shift, -shift), (1, 2)) if shift else x)
            q, k, v = layer(x).view(-1, 16, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            scores = q @ k.transpose(-2, -1)
            if shift:
                mask = self._mask(high, wide, shift)
                scores = scores.view(batch, mask.shape[0], 2, 16, 16) + mask[:, None][None]
                scores = scores.view(-1, 2, 16, 16)
            x = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(-1, 4, 4, 8)
            x = x.view(-1, high // 4, wide // 4, 4, 4, 8).permute(0, 1, 3, 2, 4, 5)
            x = x.reshape(-1, high, wide, 8)
            x = x.roll((shift, shift), (1, 2)) if shift else x
            tokens = tokens + x[:, :height, :width].reshape(batch, height * width, 8)
        return tokens

    def _mask(self, high: int, wide: int, shift: int) -> Tensor:
        """Return what keeps the pixels of a window apart that are no neighbours in the image."""
        rows, columns = (
            (torch.arange(size) >= size - 4).int() + (torch.arange(size) >= size - shift).int()
            for size in (high, wide)
        )
        regions = self._partitioned((3 * rows[:, None] + columns)[None, :, :, None].float())
        parts = regions.transpose(1, 2) - regions
        return parts.masked_fill(parts != 0, -100.0)

    def _partitioned(self, x: Tensor) -> Tensor:
        batch, high, wide, channels = x.shape
        x = x.view(batch, high // 4, 4, wide // 4, 4, channels)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, channels)


def test_windows_of_images_of_any_size_plan_memory_for_whole_windows() -> None:
    torch.manual_seed(0)
    model = Windows().eval()
    images = [torch.randn(2, 8, *sides) for sides in ((16, 24), (9, 7), (17, 30))]
    sides = {0: Dim.AUTO(max=4), 2: Dim.AUTO(max=32), 3: Dim.AUTO(max=32)}
    program = torch.export.export(model, (images[0],), dynamic_shapes=(sides,))
    lowered = lower(program, [XnnpackPartitioner()])
    found: Any = facts_of(lowered.program)
    assert found["planned"] <= 5 * 4 * 8 * 32 * 32 * 4, found
    assert found["delegates"] <= 7, found
    assert found["kernels"] <= 66, found
    calls = [([image], [model(image).detach()]) for image in images]
    assert compared(bytes(lowered.buffer), calls)["outcome"] == "right"


@pytest.mark.parametrize("decomposed", [False, True])
def test_a_llama_written_by_hand_is_one_delegate(decomposed: bool) -> None:
    """Its norm scales before it divides by a mean, and its keys are repeated for their queries."""
    torch.manual_seed(0)
    model = Llama(64, 2, 100).eval()
    tokens = [torch.randint(0, 100, sizes) for sizes in ((2, 16), (1, 5), (4, 32))]
    dims = ({0: Dim("batch", max=4), 1: Dim("tokens", max=32)},)
    program = torch.export.export(model, (tokens[0],), dynamic_shapes=dims)
    if decomposed:
        data = bytes(lower(program, [XnnpackPartitioner()]).buffer)
    else:
        data = emit(to_backend(program, XnnpackPartitioner())).to_bytes()
    found: Any = facts_of(deserialize_pte(data))
    assert found["delegates"] == 1, found
    assert found["kernels"] <= 20, found
    calls = [([ids], [model(ids).detach()]) for ids in tokens]
    assert compared(data, calls)["outcome"] == "right"


def test_products_of_windows_stay_merged() -> None:
    """As in ConvBert, whose lines become images of one column before they are cut in windows."""
    torch.manual_seed(0)

    def convolve(m: Any, x: Tensor) -> Tensor:
        kernels = m.layer(x).reshape(-1, 3, 1).softmax(1)
        image = x.transpose(1, 2).contiguous().unsqueeze(-1)
        windows = nn.functional.unfold(image, (3, 1), padding=(1, 0))
        windows = windows.transpose(1, 2).reshape(x.shape[0], -1, 16, 3).reshape(-1, 8, 3)
        return (windows @ kernels).reshape(-1, 16).reshape(x.shape[0], -1, 2, 8).flatten(2)

    model = Of(convolve, layer=nn.Linear(16, 6)).eval()
    inputs = [torch.randn(*sizes, 16) for sizes in ((2, 16), (1, 5), (4, 32))]
    dims = (({0: Dim("batch", max=4), 1: Dim("tokens", max=32)},),)
    program = torch.export.export(model, (inputs[0],), dynamic_shapes=dims)
    lowered = lower(program, [XnnpackPartitioner()])
    found: Any = facts_of(lowered.program)
    assert found["delegates"] <= 3, found
    assert found["kernels"] <= 9, found
    calls = [([x], [model(x).detach()]) for x in inputs]
    assert compared(bytes(lowered.buffer), calls)["outcome"] == "right"


def test_attention_by_einsum_is_one_delegate() -> None:
    torch.manual_seed(0)

    def attend(m: Any, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 16)) for y in m.layer(x).chunk(3, -1))
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)

    model = Of(attend, layer=nn.Linear(64, 192)).eval()
    inputs = [torch.randn(*sizes, 64) for sizes in ((2, 16), (1, 5), (4, 32))]
    dims = (({0: Dim("batch", max=4), 1: Dim("tokens", max=32)},),)
    program = torch.export.export(model, (inputs[0],), dynamic_shapes=dims)
    lowered = lower(program, [XnnpackPartitioner()])
    found: Any = facts_of(lowered.program)
    assert (found["delegates"], found["kernels"]) == (1, 0), found
    calls = [([x], [model(x).detach()]) for x in inputs]
    assert compared(bytes(lowered.buffer), calls)["outcome"] == "right"
