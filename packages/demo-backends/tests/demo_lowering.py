"""How the tests of this package lower a module and run the delegates in it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
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
from lowerdeck_zoo import exported


def lower(module: nn.Module, inputs: tuple[Any, ...], partitioner: Partitioner) -> ExportedProgram:
    """Return the module's program with its partitions lowered."""
    return to_backend(exported(module, *inputs), partitioner)


def delegates(program: ExportedProgram) -> list[LoweredBackendModule]:
    """Return the delegates of the outermost graph, in order."""
    return get_lowered_backend_modules(program.graph_module)


def sealed(name: str, body: str | bytes, version: str = "2") -> bytes:
    """Return a blob with this body and a right checksum, as a forger would make it."""
    content = body if isinstance(body, bytes) else body.encode()
    return f"{name} {version} {zlib.crc32(content):08x}\n".encode() + content


def named_data(delegate: LoweredBackendModule) -> dict[str, memoryview]:
    """Return a delegate's named data as the runtime sees it."""
    output = delegate.named_data_store_output
    if output is None:
        return {}
    return {
        key: memoryview(cast("bytes", output.buffers[entry.buffer_index])).cast("B")
        for key, entry in output.pte_data.items()
    }


def run(
    delegate: LoweredBackendModule, runtime: Any, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Run one delegate with its runtime."""
    return run_blob(delegate.processed_bytes, runtime, named_data(delegate), inputs)


def run_blob(
    blob: bytes, runtime: Any, data: Mapping[str, memoryview], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Run a blob with a runtime."""
    return list(runtime.execute(runtime.init(memoryview(blob), [], data), inputs))
