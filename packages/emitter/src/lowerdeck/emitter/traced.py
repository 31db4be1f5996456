"""The parts of an ExportedProgram that the emitter reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature


@dataclass(frozen=True, slots=True)
class TracedProgram:
    """A functional graph with its signature and its tensors.

    ``ExportedProgram`` verifies its parts, and rejects a valid graph in which two buffers get the
    same new value; the emitter's graphs need no second verification.

    Attributes:
        graph_module: The graph, with nested control flow.
        graph_signature: The kind of each input and output.
        state_dict: Parameters and persistent buffers.
        call_spec: Pytree specs of the inputs and outputs.
        ranges: Range of each symbol, as set by the user: while tracing, torch assumes at least 2.
    """

    graph_module: fx.GraphModule
    graph_signature: ExportGraphSignature
    state_dict: Mapping[str, torch.Tensor]
    constants: Mapping[str, Any]
    call_spec: Any
    ranges: Mapping[Any, Any] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        """Return the outermost graph."""
        return self.graph_module.graph

    @classmethod
    def of(cls, exported: ExportedProgram) -> TracedProgram:
        """Return ``exported`` as it is.

        Args:
            exported: A program whose graph is functional.
        """
        return cls(
            exported.graph_module,
            exported.graph_signature,
            exported.state_dict,
            exported.constants,
            exported.call_spec,
            exported.range_constraints,
        )
