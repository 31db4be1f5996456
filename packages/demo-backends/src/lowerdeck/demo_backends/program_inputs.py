"""What a partition takes and gives: its true inputs, its outputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch.export import ExportedProgram
from torch.fx import Node


def user_inputs(program: ExportedProgram) -> list[Node]:
    """Return the placeholders that the caller fills, in order."""
    wanted = set(program.graph_signature.user_inputs)
    return [
        node for node in program.graph.nodes if node.op == "placeholder" and node.name in wanted
    ]


def output_nodes(program: ExportedProgram) -> Sequence[Node | None]:
    """Return what the program's outputs are, in order: nodes, or None."""
    output = next(node for node in reversed(program.graph.nodes) if node.op == "output")
    returned = output.args[0]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]
