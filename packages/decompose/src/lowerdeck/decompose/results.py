"""Results of ``take_apart`` and ``explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule


@dataclass(frozen=True, slots=True)
class Parts:
    """A program decomposed, before an ``ExportedProgram`` is made of it.

    Attributes:
        graph_module: The functional graph, with those of its control flow inside.
        graph_signature: What each input and output is.
        state_dict: Parameters and persistent buffers.
        constants: All other tensors.
    """

    graph_module: GraphModule
    graph_signature: ExportGraphSignature
    state_dict: Mapping[str, Any]
    constants: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which way a program goes, and why.

    Attributes:
        reason: Why torch has to trace the whole program; None where each distinct call is traced.
        traces: How many distinct calls were traced; what comes out as it went in needs none.
        copies: How many calls became copies of one that was traced before.
        failed: Whether that reason is an error that a call raised where it was traced by itself:
            a fault of its decomposition, or of ours.
    """

    reason: str | None
    traces: int
    copies: int
    failed: bool = False

    def __str__(self) -> str:
        if self.reason is not None:
            return f"torch traces the whole program: {self.reason}"
        return f"{self.traces} distinct calls traced, {self.copies} copied"


# torch's verifier asks for all buffers once for each that is written, and a signature tells anew.
CachedSignature: Any = type(
    "CachedSignature",
    (ExportGraphSignature,),
    {
        name: cached_property(held.fget)
        for name, held in vars(ExportGraphSignature).items()
        if isinstance(held, property) and held.fget is not None
    },
)
"""A signature that tells each thing once, for as long as it does not change."""
