"""Lets the tests import the modules beside them; a lowered module as backends make it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._higher_order_ops.executorch_call_delegate import executorch_call_delegate
from torch.export import ExportedProgram, export

from lowerdeck.serializer import CompileSpec

# Tests import what they share by its plain name, from the sources and from a copy alike.
sys.path.insert(0, str(Path(__file__).parent))


class LoweredBackendModule(torch.nn.Module):
    """Calls its original program; torch knows a delegate by this class name."""

    def __init__(
        self,
        original: ExportedProgram,
        content: bytes = b"blob",
        meta: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.original_module = original
        self.backend_id = "TestBackend"
        self.processed_bytes = content
        self.compile_specs = [CompileSpec("level", b"3")]
        self.named_data_store_output = None
        self.meta = meta or {}

    def forward(self, *args: torch.Tensor) -> Any:
        return executorch_call_delegate(self, *args)


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * 2,)


@pytest.fixture
def lowered() -> Callable[..., LoweredBackendModule]:
    """Return a maker of lowered modules that double a tensor of shape (2, 3)."""

    def make(content: bytes = b"blob", **attributes: Any) -> LoweredBackendModule:
        exported = export(Doubled(), (torch.ones(2, 3),))
        return LoweredBackendModule(exported, content, **attributes)

    return make
