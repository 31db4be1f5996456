"""Kernels that may write where they read, in the official runtime."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch import Tensor, nn

from lowerdeck.emitter import OFFICIAL_KERNELS, EmittedProgram, emit
from lowerdeck.serializer import KernelCall
from lowerdeck_zoo import Of, assert_close, exported, official

IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{
        name: lambda x, y, name=name: getattr(torch, name)(x)
        for name in ("relu", "neg", "exp", "sigmoid", "tanh", "abs", "sin", "cos", "erf")
    },
    "gelu": lambda x, y: F.gelu(x),
    "sqrt": lambda x, y: torch.sqrt(x.abs()),
    "rsqrt": lambda x, y: torch.rsqrt(x.abs() + 1),
    "clamp": lambda x, y: torch.clamp(x, -0.5, 0.5),
    "hardtanh": lambda x, y: F.hardtanh(x),
    "leaky_relu": lambda x, y: F.leaky_relu(x),
    "elu": lambda x, y: F.elu(x),
    "log": lambda x, y: torch.log(x.abs() + 1),
    "logical_not": lambda x, y: torch.logical_not(x > 0),
    "pow": lambda x, y: x**2,
    "add": torch.add,
    "sub": lambda x, y: y - x,
    "mul": torch.mul,
    "div": lambda x, y: y / (x.abs() + 1),
    "maximum": torch.maximum,
    "minimum": lambda x, y: torch.minimum(y, x),
    "where": lambda x, y: torch.where(y > 0, x, y),
    "_native_batch_norm_legit_no_training": lambda x, y: F.batch_norm(
        x, torch.zeros(8), torch.ones(8) * 2
    ),
}
WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_put": lambda c, x, i: torch.index_put(c, (i,), x),
    "slice_scatter": lambda c, x, _: torch.slice_scatter(c, x, 0, 1, 3),
    "select_scatter": lambda c, x, _: torch.select_scatter(c, x[0], 0, 1),
    "scatter": lambda c, x, i: torch.scatter(c, 0, i.view(2, 1).expand(2, 4), x),
    "scatter_add": lambda c, x, i: torch.scatter_add(c, 0, i.view(2, 1).expand(2, 4), x),
    "masked_scatter": lambda c, x, i: torch.masked_scatter(c, c > i.sum() + 3, x.repeat(2, 1)),
}


def calls_of(emitted: EmittedProgram) -> list[tuple[str, list[str]]]:
    """Return the kernel of each call, and where each tensor among its arguments is stored."""
    (plan,) = emitted.program.execution_plan
    steps = [step.instr_args for step in plan.chains[0].instructions]
    found = []
    for step in steps:
        if isinstance(step, KernelCall):
            values = [plan.values[index].val for index in step.args]
            places = [getattr(value, "allocation_info", None) for value in values]
            name = plan.operators[step.op_index].name.removeprefix("aten::")
            found.append((name, [repr(place) for place in places if place is not None]))
    return found


def compare(emitted: EmittedProgram, model: nn.Module, *calls: tuple[Any, ...]) -> None:
    outputs = official.outputs(emitted.to_bytes(), calls)
    for call, found in zip(calls, outputs, strict=True):
        assert_close(found, model(*call), atol=1e-5, rtol=1e-5)


def test_every_kernel_that_writes_in_place_is_tried() -> None:
    assert set(IN_PLACE) == OFFICIAL_KERNELS.in_place_safe
    assert set(WRITES) == OFFICIAL_KERNELS.writes_into_self


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_safe_kernel_may_write_where_it_reads(name: str) -> None:
    model, args = Of(lambda x, y: IN_PLACE[name](x * 3, y) * 2), (torch.randn(6, 8), torch.ones(8))
    emitted = emit(exported(model, *args))
    compare(emitted, model, args)
    kernels = calls_of(emitted)
    places = next(places for kernel, places in kernels[:-1] if kernel == name)
    # The output is there twice, as argument and as return value.
    assert any(places.count(one) > 2 for one in places) or len(set(places)) == 1


@pytest.mark.parametrize("name", WRITES)
def test_a_buffer_is_written_without_an_extra_copy(name: str) -> None:
    def scatter(self: Any, x: Tensor, i: Tensor) -> Any:
        return self.cache.copy_(WRITES[name](self.cache, x, i)) + 1

    module = Of(scatter, cache=torch.arange(12.0).view(3, 4))
    calls = [(torch.randn(2, 4), torch.tensor([2, 0])) for _ in range(3)]
    emitted = emit(exported(copy.deepcopy(module), *calls[0]))
    assert "clone" not in [kernel for kernel, _ in calls_of(emitted)]
    compare(emitted, module, *calls)
