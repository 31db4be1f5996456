"""How the tests of this package lower a module and run the delegates in it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.export import ExportedProgram

from lowerdeck.lowered_module import LoweredBackendModule, Partitioner, to_backend


def lower(
    module: nn.Module, inputs: tuple[Any, ...], partitioner: Partitioner, **options: Any
) -> ExportedProgram:
    """Return the module's program with its partitions lowered."""
    return to_backend(torch.export.export(module.eval(), inputs, **options), partitioner)


def delegates(program: ExportedProgram) -> list[LoweredBackendModule]:
    """Return the delegates of the outermost graph, in order."""
    found = [getattr(program.graph_module, str(node.target)) for node in _reads(program)]
    return [one for one in found if isinstance(one, LoweredBackendModule)]


def _reads(program: ExportedProgram) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if node.op == "get_attr"]


def named_data(delegate: LoweredBackendModule) -> dict[str, memoryview]:
    """Return a delegate's named data as the runtime sees it."""
    output = delegate.named_data_store_output
    if output is None:
        return {}
    return {
        key: memoryview(cast("bytes", output.buffers[entry.buffer_index])).cast("B")
        for key, entry in output.pte_data.items()
    }
