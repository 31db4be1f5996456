"""Views that need no copy take no kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowerdeck.emitter import emit
from lowerdeck.serializer import KernelCall
from lowerdeck_zoo import Of, exported

SHARED: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[int, ...]]] = {
    "permute": (lambda x: (x + 1).permute(1, 0, 2) * 2, (1, 4, 3)),
    "transpose": (lambda x: (x + 1).transpose(0, 2) * 2, (1, 1, 3)),
    "t": (lambda x: (x + 1).t() * 2, (1, 3)),
    "select": (lambda x: (x + 1)[-1] * 2, (4, 3)),
    "slice": (lambda x: (x + 1)[-2:] * 2, (4, 3)),
    "inner slice": (lambda x: (x + 1)[:, 1:3] * 2, (1, 4, 3)),
    "reshape": (lambda x: (x + 1).reshape(3, 4) * 2, (4, 3)),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_needs_no_copy_takes_no_kernel(name: str) -> None:
    function, shape = SHARED[name]
    plan = emit(exported(Of(function), torch.randn(shape))).program.execution_plan[0]
    steps = [step.instr_args for step in plan.chains[0].instructions]
    assert sum(isinstance(step, KernelCall) for step in steps) == 2
