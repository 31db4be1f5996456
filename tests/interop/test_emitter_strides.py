"""The layout that torch gives attention's result costs no kernel; zoo programs have the rest."""

from __future__ import annotations

from typing import Any

import torch

from lowerdeck.emitter import emit
from lowerdeck.serializer import KernelCall
from lowerdeck_zoo import Of, exported
from lowerdeck_zoo.models.strides import attend, heads, joined


def test_the_layout_of_attention_costs_no_kernel() -> None:
    def count(function: Any) -> int:
        emitted = emit(exported(Of(function), torch.randn(2, 3, 8)))
        steps = emitted.program.execution_plan[0].chains[0].instructions
        return sum(isinstance(step.instr_args, KernelCall) for step in steps)

    plain = count(lambda x: attend(heads(x), heads(x), heads(x)))
    assert count(lambda x: joined(attend(heads(x), heads(x * 2), heads(x + 1)))) <= plain + 3
