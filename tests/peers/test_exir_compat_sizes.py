"""Files that ExecuTorch's own XnnpackPartitioner makes through exir and through exir-compat."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

exir = pytest.importorskip("executorch.exir", reason="executorch with its dependencies is needed")
torchao = pytest.importorskip("torchao.quantization")

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # noqa: E402
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (  # noqa: E402
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)

from lowerdeck import exir_compat  # noqa: E402
from lowerdeck_zoo import official  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Gated(nn.Module):
    """Three linear layers, of which two read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 96), nn.Linear(64, 96, bias=False)
        self.down = nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gated product, projected."""
        result: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return result


def _quantized(config: Any, *, unwrapped: bool) -> Callable[[nn.Module, Tensor], ExportedProgram]:
    def export(model: nn.Module, x: Tensor) -> ExportedProgram:
        torchao.quantize_(model, config)
        if unwrapped:
            importlib.import_module("torchao.utils").unwrap_tensor_subclass(model)
        return torch.export.export(model, (x,))

    return export


def _pt2e(*, is_dynamic: bool) -> Callable[[nn.Module, Tensor], ExportedProgram]:
    def export(model: nn.Module, x: Tensor) -> ExportedProgram:
        steps = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
        config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=is_dynamic)
        quantizer = XNNPACKQuantizer().set_global(config)
        prepared = steps.prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
        prepared(x)
        return torch.export.export(steps.convert_pt2e(prepared), (x,))

    return export


def _dynamic(dtype: Any, granularity: Any) -> Any:
    return torchao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=dtype, weight_granularity=granularity
    )


MODES: dict[str, Callable[[nn.Module, Tensor], ExportedProgram]] = {
    "float": lambda model, x: torch.export.export(model, (x,)),
    "PT2E, static": _pt2e(is_dynamic=False),
    "PT2E, dynamic": _pt2e(is_dynamic=True),
    # exir finds no kernel for the unwrapped form.
    "weights alone, rows of int8": _quantized(
        torchao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=torchao.PerAxis(0)),
        unwrapped=False,
    ),
} | {
    f"dynamic, {name}{', unwrapped' * unwrapped}": _quantized(config, unwrapped=unwrapped)
    for unwrapped in (False, True)
    for name, config in {
        "rows of int8": _dynamic(torch.int8, torchao.PerAxis(0)),
        "rows of int4": _dynamic(torch.int4, torchao.PerAxis(0)),
        "groups of int4": _dynamic(torch.int4, torchao.PerGroup(32)),
    }.items()
}


@pytest.mark.skipif(not official.available(), reason=official.REASON)
@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 64)])
@pytest.mark.parametrize("mode", MODES)
def test_its_partitioner_makes_files_of_exirs_size(mode: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    program = MODES[mode](Gated().eval().requires_grad_(False), x)
    files = [
        library.to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        .to_executorch()
        .buffer
        for library in (exir, exir_compat)
    ]
    sizes = [len(data) for data in files]
    assert sizes[1] <= 1.01 * sizes[0], sizes
    outcomes = [official.run(bytes(data), [official.Call((x,))]) for data in files]
    assert all(isinstance(one, official.Ran) for one in outcomes), outcomes
    peer, ours = (one.outputs[0][0] for one in outcomes)
    torch.testing.assert_close(ours, peer)
