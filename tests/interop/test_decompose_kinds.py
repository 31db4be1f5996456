"""Kinds of programs that neither the zoo nor the soak's generator has, taken apart beside torch.

The judge is that of ``nox -s retraced``: operators, arguments, values and signature are torch's,
numbers and state are eager's, twice.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch.export import Dim, ExportedProgram

from lowerdeck.decompose import decompose
from lowerdeck.demo_backends import ExecutorPartitioner
from lowerdeck.lowered_module import executorch_call_delegate, to_backend
from tests.retraced.judge import judge

pytestmark = pytest.mark.filterwarnings("ignore")

Made = tuple[nn.Module, Sequence[Any], Any]


class _Calls(nn.Module):
    """Calls a function with itself, which holds modules and buffers for it."""

    def __init__(self, function: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, each in held.items():
            if isinstance(each, nn.Module):
                self.add_module(name, each)
            else:
                self.register_buffer(name, each)

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        return self.function(self, x, *more)


def _x(*sizes: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(sizes).numel()).view(sizes)


def _loop_over_a_view() -> Made:
    def called(own: Any, x: torch.Tensor) -> Any:
        y = x * 2
        view = y.t()
        view[0].add_(1)
        _, z = while_loop(  # type: ignore[no-untyped-call]
            lambda i, _: i < 3,
            lambda i, z: (i + 1, nn.functional.silu(z) + view[0, 0]),
            (torch.tensor(0), view.contiguous()),
        )
        y.add_(1)
        return z, view

    return _Calls(called), (_x(4, 6),), None


def _scan_of_what_was_written() -> Made:
    def called(own: Any, x: torch.Tensor) -> Any:
        def step(carry: torch.Tensor, row: torch.Tensor) -> Any:
            new = carry * 0.5 + torch.softmax(row, -1)
            return new, new.clone().reshape(2, 3)

        y = x + 1
        y[0].zero_()
        carry, rows = scan(step, own.first.clone(), y)
        own.first.copy_(carry)
        return carry, rows

    return _Calls(called, first=torch.zeros(6)), (_x(4, 6),), None


def _map_of_what_was_written() -> Made:
    def called(own: Any, x: torch.Tensor) -> Any:
        y = x * 1
        y[:, 0].add_(1)
        return map_rows(lambda row, w: nn.functional.gelu(row) @ w, y, own.weight)

    sizes = ({0: Dim("n", min=2, max=64)},)
    return _Calls(called, weight=_x(6, 2)), (_x(4, 6),), sizes


def _several_sizes() -> Made:
    def called(own: Any, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        both = torch.cat([x, y], 0)
        flat = (both[:, : z.shape[0]] @ z).flatten()
        return (
            *(both, flat.unfold(0, 2, 1).sum(-1), nn.functional.pad(flat, (1, 2))),
            *(x.view(-1, 2, 3).permute(2, 0, 1).flatten(1), torch.arange(x.shape[0]) + y.shape[0]),
        )

    n, m, k = (Dim(name, min=2, max=20) for name in "nmk")
    return _Calls(called), (_x(4, 6), _x(3, 6), _x(6, 5)), ({0: n}, ({0: m}, {1: k}))


def _found_sizes() -> Made:
    def called(own: Any, x: torch.Tensor) -> Any:
        where = torch.nonzero(x > 0)
        own.count.add_(where.shape[0])
        rows = x[where[:, 0]]
        return rows.reshape(-1, 2, 3).sum(-1), torch.masked_select(x, x > 0.1).sort()[0]

    return _Calls(called, count=torch.zeros(1)), (_x(4, 6),), None


def _called_with_other_weights() -> Made:
    def called(own: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        call = torch.func.functional_call
        one = call(own.linear, {"weight": weight, "bias": own.bias * 2}, (x,))
        return one + call(own.linear, {"weight": weight.t(), "bias": own.bias}, (x,))

    return _Calls(called, linear=nn.Linear(6, 6), bias=_x(6)), (_x(4, 6), _x(6, 6)), None


def _in_halves(dtype: torch.dtype) -> Made:
    model = nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.SiLU(), nn.Flatten(), nn.Linear(16, 3)
    )
    return model.eval().to(dtype), (_x(2, 3, 6).to(dtype),), None


def _quantised_by_patterns() -> Made:
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    q = torch.ops.quantized_decomposed

    def called(own: Any, x: torch.Tensor) -> Any:
        range_ = (0.1, 3, -128, 127, torch.int8)
        y = q.dequantize_per_tensor(q.quantize_per_tensor(x, *range_), *range_)
        weight = q.dequantize_per_channel(
            own.weight, own.scales, own.zeros, 0, -127, 127, torch.int8
        )
        return nn.functional.linear(y, weight).relu()

    held = {"weight": torch.arange(-9, 9, dtype=torch.int8).view(3, 6), "scales": _x(3).exp()}
    return _Calls(called, zeros=torch.zeros(3, dtype=torch.int64), **held), (_x(4, 6),), None


def _quantised_by_torchao() -> Made:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    importlib.import_module("torchao.utils").unwrap_tensor_subclass(model)
    return model, (_x(2, 64),), None


_KINDS: dict[str, Callable[[], Made]] = {
    "a loop over a view": _loop_over_a_view,
    "a scan of what was written": _scan_of_what_was_written,
    "a map of what was written": _map_of_what_was_written,
    "several sizes": _several_sizes,
    "found sizes": _found_sizes,
    "other weights": _called_with_other_weights,
    "float16": lambda: _in_halves(torch.float16),
    "bfloat16": lambda: _in_halves(torch.bfloat16),
    "quantised by patterns": _quantised_by_patterns,
    "quantised by torchao": _quantised_by_torchao,
}


def _export(make: Callable[[], Made]) -> ExportedProgram:
    torch.manual_seed(0)
    model, inputs, sizes = make()
    with torch.no_grad():
        return torch.export.export(model, tuple(inputs), dynamic_shapes=sizes)


def _eager(make: Callable[[], Made]) -> tuple[nn.Module, Sequence[Any]]:
    torch.manual_seed(0)
    return make()[:2]


@pytest.mark.parametrize("saved", [False, True], ids=["", "saved"])
@pytest.mark.parametrize("kind", _KINDS)
def test_it_comes_out_as_torch_gives_it(kind: str, saved: bool) -> None:
    def export() -> ExportedProgram:
        program = _export(_KINDS[kind])
        if not saved:
            return program
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        return torch.export.load(file)

    found = judge(kind, kind, export, lambda: _eager(_KINDS[kind]))
    assert (found.outcome, found.whole) == ("same", ""), found


def _delegated() -> ExportedProgram:
    def called(own: Any, x: torch.Tensor) -> Any:
        y = own.linear(x)
        own.sum.add_(y.sum(0))
        return torch.softmax(y, -1).flatten()[::2], own.sum * 1

    torch.manual_seed(0)
    model = _Calls(called, linear=nn.Linear(6, 6), sum=torch.zeros(6))
    program = torch.export.export(model, (_x(4, 6),))
    return to_backend(program, ExecutorPartitioner())


@pytest.mark.parametrize("before", [lambda program: program, decompose], ids=["", "again"])
def test_what_was_lowered_stays_lowered(before: Callable[[Any], ExportedProgram]) -> None:
    found = judge("delegates", "", lambda: before(_delegated()))
    assert (found.outcome, found.whole) == ("same", ""), found
    nodes = decompose(_delegated()).graph.nodes
    assert any(node.target is executorch_call_delegate for node in nodes)
