"""Kinds of programs that neither the zoo nor the soak's generator has, decomposed beside torch.

The judge is that of ``nox -s retraced``: operators, arguments, values and signature are torch's,
numbers and state are eager's, twice.
"""

from __future__ import annotations

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
from lowerdeck.lowered_module import executorch_call_delegate, to_backend
from lowerdeck_zoo import Of, saved_and_loaded
from lowerdeck_zoo.executor_backend import ExecutorPartitioner
from tests.retraced.judge import judge

Made = tuple[nn.Module, Sequence[Any], Any]


def _x(*sizes: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(sizes).numel()).view(sizes)


def _loop_over_a_view() -> Made:
    def called(x: torch.Tensor) -> Any:
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

    return Of(called), (_x(4, 6),), None


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

    return Of(called, first=torch.zeros(6)), (_x(4, 6),), None


def _map_of_what_was_written() -> Made:
    def called(own: Any, x: torch.Tensor) -> Any:
        y = x * 1
        y[:, 0].add_(1)
        return map_rows(lambda row, w: nn.functional.gelu(row) @ w, y, own.weight)

    sizes = ({0: Dim("n", min=2, max=64)},)
    return Of(called, weight=_x(6, 2)), (_x(4, 6),), sizes


def _called_with_other_weights() -> Made:
    def called(own: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        call = torch.func.functional_call
        one = call(own.linear, {"weight": weight, "bias": own.bias * 2}, (x,))
        return one + call(own.linear, {"weight": weight.t(), "bias": own.bias}, (x,))

    return Of(called, linear=nn.Linear(6, 6), bias=_x(6)), (_x(4, 6), _x(6, 6)), None


_KINDS: dict[str, Callable[[], Made]] = {
    "a loop over a view": _loop_over_a_view,
    "a scan of what was written": _scan_of_what_was_written,
    "a map of what was written": _map_of_what_was_written,
    "other weights": _called_with_other_weights,
}


def _export(make: Callable[[], Made]) -> ExportedProgram:
    torch.manual_seed(0)
    model, inputs, sizes = make()
    with torch.no_grad():
        return torch.export.export(model, tuple(inputs), dynamic_shapes=sizes and (sizes,))


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
        return saved_and_loaded(program)

    found = judge(kind, kind, export, lambda: _eager(_KINDS[kind]))
    assert (found.outcome, found.whole) == ("same", ""), found


def _delegated() -> ExportedProgram:
    def called(own: Any, x: torch.Tensor) -> Any:
        y = own.linear(x)
        own.sum.add_(y.sum(0))
        return torch.softmax(y, -1).flatten()[::2], own.sum * 1

    torch.manual_seed(0)
    model = Of(called, linear=nn.Linear(6, 6), sum=torch.zeros(6))
    program = torch.export.export(model, (_x(4, 6),))
    return to_backend(program, ExecutorPartitioner())


@pytest.mark.parametrize("before", [lambda program: program, decompose], ids=["", "again"])
def test_what_was_lowered_stays_lowered(before: Callable[[Any], ExportedProgram]) -> None:
    found = judge("delegates", "", lambda: before(_delegated()))
    assert (found.outcome, found.whole) == ("same", ""), found
    nodes = decompose(_delegated()).graph.nodes
    assert any(node.target is executorch_call_delegate for node in nodes)
