"""How the tests of this package lower a module and run the delegates in it."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import nn
from torch.export import ExportedProgram

from lowerdeck.lowered_module import (
    LoweredBackendModule,
    Partitioner,
    get_lowered_backend_modules,
    to_backend,
)
from lowerdeck.serializer import XnnGraph, decode_payload
from lowerdeck.xnnpack import XnnpackPartitioner, XnnpackRuntime

RUNTIME = XnnpackRuntime()


def lower(
    module: nn.Module,
    inputs: tuple[Any, ...],
    partitioner: Partitioner | None = None,
    **options: Any,
) -> ExportedProgram:
    """Return the module's program with its partitions lowered."""
    exported = torch.export.export(module.eval(), inputs, **options)
    return to_backend(exported, partitioner or XnnpackPartitioner())


def delegates(program: ExportedProgram) -> list[LoweredBackendModule]:
    """Return the delegates of the outermost graph, in order."""
    return get_lowered_backend_modules(program.graph_module)


def whole(program: ExportedProgram) -> LoweredBackendModule:
    """Return the one delegate of a program, outside of which nothing computes."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    names = [str(node.target) for node in calls if node.target is not operator.getitem]
    others = [name for name in names if "sym_size" not in name]
    assert others == ["executorch_call_delegate"], others
    (delegate,) = delegates(program)
    return delegate


def graph_of(module: nn.Module, *inputs: Any, precision: str | None = None) -> XnnGraph:
    """Return the payload of the one delegate of a model."""
    (delegate,) = delegates(lower(module, inputs, XnnpackPartitioner(precision)))
    return decode_payload(delegate.processed_bytes)


def labels(delegate: LoweredBackendModule) -> list[str]:
    """Return the operators of a payload in order."""
    return [node.operator.label for node in decode_payload(delegate.processed_bytes).nodes]


def run(delegate: LoweredBackendModule, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return what our runtime computes."""
    handle = RUNTIME.init(memoryview(delegate.processed_bytes), [], named_data(delegate))
    return RUNTIME.execute(handle, inputs[: RUNTIME.input_count(handle)])


def named_data(delegate: LoweredBackendModule) -> dict[str, memoryview]:
    """Return a delegate's named data as the runtime sees it."""
    output = delegate.named_data_store_output
    if output is None:
        return {}
    return {
        key: memoryview(cast("bytes", output.buffers[entry.buffer_index])).cast("B")
        for key, entry in output.pte_data.items()
    }
