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
    """A decomposed program, before it is assembled to an ``ExportedProgram``.

    Attributes:
        graph_module: The functional graph, with those of its control flow inside.
        graph_signature: Kinds of its inputs and outputs.
        state_dict: Parameters and persistent buffers, shared with the original program.
        constants: Lifted constants and other buffers, shared with the original program.
    """

    graph_module: GraphModule
    graph_signature: ExportGraphSignature
    state_dict: Mapping[str, Any]
    constants: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Explanation:
    """How ``decompose`` converts a program, and why.

    Attributes:
        reason: Why torch has to trace the whole program; None where each distinct call is traced.
        traces: How many distinct calls were traced; calls that stay as they are need no trace.
        copies: How many calls are copies of one that was traced before; those that become
            themselves need no trace and are not counted.
        failed: Whether the reason is an exception that a trace raised: a fault of a rule, of
            torch or of this package.
    """

    reason: str | None
    traces: int
    copies: int
    failed: bool = False

    def __str__(self) -> str:
        if self.reason is not None:
            return f"torch traces the whole program: {self.reason}"
        return f"{self.traces} distinct calls traced, {self.copies} copied"


# torch's verifier computes the set of all buffers once for each mutated one.
CachedSignature: Any = type(
    "CachedSignature",
    (ExportGraphSignature,),
    {
        name: cached_property(member.fget)
        for name, member in vars(ExportGraphSignature).items()
        if isinstance(member, property) and member.fget is not None
    },
)
"""A signature that computes each of its properties once; for as long as it is not changed."""
