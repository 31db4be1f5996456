"""Run emitted programs in the runner beside eager, and list the kernels that they call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lowerdeck.emitter import EmitConfig, EmittedProgram, emit
from lowerdeck.runner import load
from lowerdeck.serializer import KernelCall
from lowerdeck_zoo import Of, assert_close, exported


def kernels(emitted: EmittedProgram, method: int = 0) -> list[str]:
    """Return the names of the kernels that a method calls, in order, without ``aten::``."""
    plan = emitted.program.execution_plan[method]
    calls = [step.instr_args for chain in plan.chains for step in chain.instructions]
    return [
        plan.operators[call.op_index].full_name.removeprefix("aten::")
        for call in calls
        if isinstance(call, KernelCall)
    ]


def results(
    emitted: EmittedProgram,
    calls: Sequence[tuple[str, Sequence[Any]]],
    content: bytes | None = None,
    **options: Any,
) -> list[list[Any]]:
    """Return the flat outputs of each call, a method and its inputs, on one loaded program.

    Args:
        emitted: The program.
        calls: The calls; the names of methods and flat inputs.
        content: The bytes of the file, if they are not those that ``to_bytes()`` returns.
        options: Options of ``load``.
    """
    program = load(content or emitted.to_bytes(), memory="poison", **options)
    methods = {name: program.method(name) for name, _ in calls}
    return [
        copy.deepcopy(methods[name].run_flat(copy.deepcopy(list(inputs))))
        for name, inputs in calls
    ]


def check(
    function: Callable[..., Any],
    *calls: Sequence[Any],
    config: EmitConfig | None = None,
    change: Callable[[Any], Any] = lambda program: program,
    tolerance: float = 1e-5,
    custom_kernels: Sequence[str] = (),
    **options: Any,
) -> EmittedProgram:
    """Compare all calls with eager, and return the program.

    Args:
        function: A function or a module.
        calls: The arguments of each call; the first is exported.
        config: Settings of the emission.
        change: What is done to the exported program, such as decomposing it.
        tolerance: Largest error, absolute and relative.
        custom_kernels: As ``load`` takes them.
        options: Options of ``torch.export.export``.
    """
    module = function if isinstance(function, nn.Module) else Of(function)
    eager = copy.deepcopy(module).eval()
    program = change(exported(module, *copy.deepcopy(calls[0]), **options))
    emitted = emit(program, config=config)
    flat = [("forward", pytree.tree_leaves(call)) for call in calls]
    found = results(emitted, flat, custom_kernels=custom_kernels)
    with torch.no_grad():
        expected = [copy.deepcopy(eager(*copy.deepcopy(call))) for call in calls]
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, atol=tolerance, rtol=tolerance)
    return emitted
