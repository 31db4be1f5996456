"""A lowered module as backends make it: its bytes are whatever the test says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._higher_order_ops.executorch_call_delegate import executorch_call_delegate
from torch.export import ExportedProgram, export


@dataclass
class Spec:
    key: str
    value: bytes


class LoweredBackendModule(torch.nn.Module):
    """Calls its original program; torch knows a delegate by this class name."""

    def __init__(
        self,
        original: ExportedProgram,
        content: bytes = b"blob",
        backend_id: str = "TestBackend",
        named_data: Any = None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.original_module = original
        self.backend_id = backend_id
        self.processed_bytes = content
        self.compile_specs = [Spec("level", b"3")]
        self.named_data_store_output = named_data
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
