"""Make the files of ``corpus_more`` anew, with all of ExecuTorch 1.4.1 and torchao 0.18.

    python tests/interop/make_corpus.py FOLDER

Not part of any session: the files in the repository are what was made once, and stay.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from executorch.exir import to_edge_transform_and_lower
from torchao.quantization.pt2e.quantize_pt2e import (  # type: ignore[import-not-found]
    convert_pt2e,
    prepare_pt2e,
)


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.full = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.deep = torch.nn.Conv2d(8, 8, 3, groups=8)
        self.last = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.deep(torch.relu(self.full(x))))
        found: torch.Tensor = self.last(inner.mean((2, 3)))
        return found


def perceptron() -> torch.nn.Module:
    layers = (torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    return torch.nn.Sequential(*layers).eval()


def quantized(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], **how: bool) -> Any:
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(**how))
    prepared = prepare_pt2e(torch.export.export(model, inputs).module(), quantizer)
    for _ in range(3):
        prepared(*map(torch.randn_like, inputs))
    return convert_pt2e(prepared)


def save(
    path: Path, model: Any, inputs: tuple[torch.Tensor, ...], atol: float, **options: Any
) -> None:
    exported = torch.export.export(model, inputs, **options)
    lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    path.write_bytes(lowered.to_executorch().buffer)
    call = {
        "method": "forward",
        "inputs": list(inputs),
        "outputs": [model(*inputs)],
        "atol": atol,
        "rtol": 1e-3,
    }
    record = {"calls": [call], "ptd": None, "needs": ["XnnpackBackend"]}
    torch.save(record, path.with_suffix(".io.pt"))


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    images, rows = (torch.randn(1, 3, 8, 8),), (torch.randn(4, 16),)
    whole = quantized(Convolutions().eval(), images, is_per_channel=True)
    save(folder / "int8_conv.pte", whole, images, 0.05)
    dynamic = quantized(perceptron(), rows, is_per_channel=True, is_dynamic=True)
    save(folder / "int8_dynamic_linear.pte", dynamic, rows, 0.05)
    batch = torch.export.Dim("batch", min=1, max=8)
    save(
        folder / "float_dynamic_batch.pte", perceptron(), rows, 1e-4, dynamic_shapes=({0: batch},)
    )
    save(folder / "half_linear.pte", perceptron().half(), (rows[0].half(),), 1e-2)


if __name__ == "__main__":
    main()
