"""Whether a program holds together: what was changed by hand may not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Node, map_arg

from lowerdeck.decompose.errors import DecomposeError

_CURE = "; change the model and export it again, or change graph, signature and tensors together"


def check_whole(program: ExportedProgram) -> None:
    """Refuse a program whose signature tells of other inputs, outputs or tensors than it has.

    Args:
        program: The program. Its graph is not walked: what is wrong inside shows where it is read.

    Raises:
        DecomposeError: It does not hold together.
    """
    graph, signature = program.graph_module.graph, program.graph_signature
    returned = graph.find_nodes(op="output")
    if len(returned) != 1 or not isinstance(returned[0].args[0], tuple | list):
        raise DecomposeError(
            f"found {len(returned)} output nodes in the graph, expected one that returns a tuple"
            + _CURE
        )
    for what, found, expected in (
        ("inputs", len(graph.find_nodes(op="placeholder")), len(signature.input_specs)),
        ("outputs", len(returned[0].args[0]), len(signature.output_specs)),
    ):
        if found != expected:
            raise DecomposeError(
                f"found {found} {what} in the graph, expected {expected}, of which its signature "
                "tells" + _CURE
            )
    for spec in signature.input_specs:
        if not _is_held(spec, program):
            raise DecomposeError(
                f"found no tensor {spec.target!r} in the program's state_dict or constants, "
                f"expected one, since its signature tells of such a {spec.kind.name}" + _CURE
            )


def read_by(node: Node, tree: Any, env: Mapping[Node, Any]) -> Any:
    """Return what a node reads, with what the nodes in it have become.

    Args:
        node: The node.
        tree: What it reads: a tree of nodes and constants.
        env: What the nodes before it have become.

    Raises:
        DecomposeError: A node in it does not come before.
    """
    try:
        return map_arg(tree, env.__getitem__)
    except KeyError as error:
        raise DecomposeError(
            f"{node.name!r} reads {str(error.args[0])!r}, found later or nowhere in the graph, "
            "expected before it: insert nodes before what reads them (graph.lint() tells)"
        ) from error


def _is_held(spec: InputSpec, program: ExportedProgram) -> bool:
    if spec.kind is InputKind.PARAMETER:
        return spec.target in program.state_dict
    if spec.kind is InputKind.BUFFER:
        # One that persists may be among the constants, as those that torch lifts are.
        return spec.target in program.state_dict or spec.target in program.constants
    return spec.kind is not InputKind.CONSTANT_TENSOR or spec.target in program.constants
