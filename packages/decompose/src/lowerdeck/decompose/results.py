"""Results of ``decompose_graph`` and ``explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a decomposed program, to be assembled to an ``ExportedProgram``.

    Attributes:
        graph_module: The functional graph, with subgraphs of control flow.
        state_dict: Parameters and persistent buffers, shared with the original program.
        constants: Lifted constants and non-persistent buffers, shared with the original program.
    """

    graph_module: GraphModule
    graph_signature: ExportGraphSignature
    state_dict: Mapping[str, Any]
    constants: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Statistics of ``decompose``.

    Attributes:
        reason: Why ``run_decompositions`` traces the whole program; None if calls are traced.
        traces: Number of traced distinct calls; unchanged calls need no trace.
        copies: Number of calls copied from a previous trace, not counting unchanged calls.
        failed: Whether the reason is an exception in a trace: a fault of a rule, torch or this
            package.
    """

    reason: str | None
    traces: int
    copies: int
    failed: bool = False

    def __str__(self) -> str:
        if self.reason is not None:
            return f"torch traces the whole program: {self.reason}"
        return f"{self.traces} distinct calls traced, {self.copies} copied"


# torch's verifier computes the set of all buffers for each mutated one.
CachedSignature: Any = type(
    "CachedSignature",
    (ExportGraphSignature,),
    {
        name: cached_property(member.fget)
        for name, member in vars(ExportGraphSignature).items()
        if isinstance(member, property) and member.fget is not None
    },
)
"""Signature that caches its properties; it must not be changed."""
