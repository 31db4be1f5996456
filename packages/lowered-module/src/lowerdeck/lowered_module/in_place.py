"""Find what a program that is not functional writes in place."""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.lowered_module._torch_private import schema_of


def written_in_place(program: ExportedProgram) -> set[Node]:
    """Return the placeholders whose memory an operator writes, directly or through views.

    A program straight from ``torch.export.export`` changes buffers so, and its signature does not
    say it; after ``run_decompositions`` there are none.

    Args:
        program: Any program; only its outermost graph is looked at.
    """
    roots: dict[Node, Node] = {node: node for node in program.graph.find_nodes(op="placeholder")}
    written: set[Node] = set()
    for node in program.graph.nodes:
        schema = schema_of(node.target)
        if node.op != "call_function" or schema is None:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is None or not isinstance(value, Node) or value not in roots:
                continue
            if argument.alias_info.is_write:
                written.add(roots[value])
            # The result is, or is a view of, this argument.
            roots[node] = roots[value]
    return written
