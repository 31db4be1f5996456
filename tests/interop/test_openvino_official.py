"""OpenVINO payloads of this project in the official runtime, with eager as the judge."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.openvino import OpenvinoPartitioner
from lowerdeck_zoo import assert_close, official
from tests.interop.runs import check, delegates, file_of, run

from openvino_cases import CASES, Calls, Case, numbers  # isort: skip

pytestmark = [
    pytest.mark.skipif(not official.available(), reason=official.REASON),
    pytest.mark.filterwarnings("ignore:Using padding=.same.:UserWarning"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_operator_runs_there_and_equals_eager(case: Case, tmp_path: Path) -> None:
    program = torch.export.export(Calls(case.function), case.inputs)
    lowered = to_backend(program, OpenvinoPartitioner())
    assert len(delegates(lowered)) == 1
    file = emit(lowered).to_bytes()
    for folder in (None, tmp_path):
        found = run(file, [case.inputs], folder)[0]
        assert_close(found, case.function(*case.inputs), rtol=1e-5, atol=2e-5)


def images() -> nn.Module:
    """Return a small network of images, as people write them."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Hardswish(inplace=True)),
        *(nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.BatchNorm2d(8), nn.ReLU6(inplace=True)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5), nn.LogSoftmax(-1)),
    ).eval()


MODELS = {
    "images": (images(), numbers(2, 3, 16, 16)),
    "channels-last": (
        images().to(memory_format=torch.channels_last),
        numbers(2, 3, 16, 16).contiguous(memory_format=torch.channels_last),
    ),
    "encoder": (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), numbers(2, 5, 16)),
    "half": (images().half(), numbers(2, 3, 16, 16).half()),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_whose_precision_the_device_chooses_are_near(name: str, tmp_path: Path) -> None:
    model, x = MODELS[name]
    partitioner = OpenvinoPartitioner(keep_precision=False)
    check(model, (x,), folder=tmp_path, tolerance=4e-2, partitioner=partitioner)


@pytest.mark.parametrize("decomposed", [False, True], ids=["raw", "decomposed"])
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_eager(name: str, decomposed: bool) -> None:
    model, x = MODELS[name]
    loose, partitioner = 4e-3 if x.dtype == torch.float16 else 2e-5, OpenvinoPartitioner()
    check(model, (x,), tolerance=loose, partitioner=partitioner, decomposed=decomposed)


def test_dynamic_sizes_are_left_to_kernels_that_tell_them() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    dynamic = {"dynamic_shapes": ({0: torch.export.Dim("batch", min=1, max=9)},)}
    calls = [(numbers(size, 4),) for size in (3, 1, 9)]
    check(model, *calls, tolerance=1e-5, partitioner=OpenvinoPartitioner(), **dynamic)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao makes the model")
def test_a_quantised_model_is_near_its_program() -> None:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    from lowerdeck.xnnpack.quantizer import XnnpackQuantizer

    model, x = images(), numbers(2, 3, 16, 16)
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), XnnpackQuantizer())
    for seed in range(4):
        prepared(numbers(2, 3, 16, 16, seed=seed))
    converted = convert_pt2e(prepared)
    program = torch.export.export(converted, (x,))
    ((found,),) = run(file_of(program, partitioner=OpenvinoPartitioner()), [(x,)])
    # A step of the last layer's scale, twice: roundings may fall to either side in each layer.
    torch.testing.assert_close(found, converted(x), rtol=0, atol=0.1)


class Windows(nn.Module):
    """Attention in shifted windows as Swin writes it: its mask is made of sizes alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an image of the same sizes."""
        batch, height, width, channels = x.shape
        x = torch.roll(x, (-2, -2), (1, 2))
        mask = x.new_zeros((height, width))
        slices, count = ((0, -4), (-4, -2), (-2, None)), 0
        for rows in slices:
            for columns in slices:
                mask[rows[0] : rows[1], columns[0] : columns[1]] = count
                count += 1
        mask = mask.view(height // 4, 4, width // 4, 4).permute(0, 2, 1, 3).reshape(-1, 16)
        mask = mask.unsqueeze(1) - mask.unsqueeze(2)
        mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
        x = x.view(batch, height // 4, 4, width // 4, 4, channels).permute(0, 1, 3, 2, 4, 5)
        query, key, value = self.qkv(x.reshape(-1, 16, channels)).chunk(3, -1)
        scores = (query @ key.transpose(1, 2)) * 0.25 + mask.repeat(batch, 1, 1)
        x = self.out(scores.softmax(-1) @ value)
        x = x.view(batch, height // 4, width // 4, 4, 4, channels).permute(0, 1, 3, 2, 4, 5)
        return torch.roll(x.reshape(batch, height, width, channels), (2, 2), (1, 2))


class Causal(nn.Module):
    """A mask of positions, on tokens of which some may be padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens, mixed."""
        places = torch.arange(x.shape[1])
        mask = places.unsqueeze(0) <= places.unsqueeze(1)
        mask = mask & (places >= 1).unsqueeze(0) | torch.eye(x.shape[1]).to(torch.bool)
        query, key, value = self.qkv(x).unsqueeze(1).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return mixed.squeeze(1)


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize(
    ("model", "sizes"),
    [(Windows, (2, 8, 12, 16)), (Causal, (2, 9, 16))],
    ids=["windows", "causal"],
)
def test_masks_of_sizes_alone_cut_nothing(
    model: type[nn.Module], sizes: tuple[int, ...], decomposed: bool, tmp_path: Path
) -> None:
    inputs = (torch.randn(sizes),)
    program = torch.export.export(model(), inputs)
    program = program.run_decompositions() if decomposed else program
    lowered = to_backend(program, OpenvinoPartitioner())
    assert len(delegates(lowered)) == 1
    (found,) = run(emit(lowered).to_bytes(), [inputs], tmp_path)
    assert_close(found, model()(*inputs), rtol=1e-5, atol=2e-5)
