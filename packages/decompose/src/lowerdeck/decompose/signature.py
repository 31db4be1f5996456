"""Inputs, outputs and signature of the new program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    OutputKind,
    OutputSpec,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import Node

from lowerdeck.decompose.calls.memory import Value
from lowerdeck.decompose.calls.template import parent_of
from lowerdeck.decompose.errors import WholeProgramError

_SYMBOL_ARGUMENTS: Mapping[Any, Any] = {
    torch.SymInt: SymIntArgument,
    torch.SymFloat: SymFloatArgument,
    torch.SymBool: SymBoolArgument,
}
_MUTATION_OF = {
    InputKind.PARAMETER: OutputKind.PARAMETER_MUTATION,
    InputKind.BUFFER: OutputKind.BUFFER_MUTATION,
    InputKind.USER_INPUT: OutputKind.USER_INPUT_MUTATION,
}
_MUTATIONS = frozenset(_MUTATION_OF.values())
_CALLS = _MUTATIONS | {OutputKind.USER_OUTPUT}


def new_outputs(
    program: ExportedProgram,
    placeholders: Mapping[Node, Any],
    outputs: Any,
    read: Callable[[Value], Node],
    base: Callable[[Any], Node],
    clone: Callable[[Node], Node],
) -> tuple[tuple[Any, ...], ExportGraphSignature]:
    """Return the outputs of the new graph, and its signature.

    Args:
        program: The program before decomposition.
        placeholders: Values of its placeholders, with their pending writes.
        outputs: Values that its output node returns.
        read: Returns the current node of a value, all writes applied.
        base: Returns the current node of a memory, all writes applied.
        clone: Adds a clone of a node.

    Raises:
        WholeProgramError: A signature cannot express what it mutates.
    """
    old = program.graph_signature
    mutated: dict[str, Value] = {}
    rest: list[tuple[OutputSpec, Any]] = []
    for spec, value in zip(old.output_specs, outputs, strict=True):
        if spec.kind not in _CALLS:
            raise WholeProgramError(f"an output is a {spec.kind.name}")
        if spec.kind in _MUTATIONS:
            mutated[str(spec.target)] = value
        else:
            rest.append((spec, value))
    # Mutations come first in a signature, in the order of the inputs.
    kept: list[tuple[OutputKind, str, Node]] = []
    written: dict[str, int] = {}
    for (node, value), input_spec in zip(placeholders.items(), old.input_specs, strict=True):
        target = str(input_spec.target or node.name)
        is_written = isinstance(value, Value) and value.memory.generation > 0
        if not is_written and target not in mutated:
            continue
        kind = _MUTATION_OF.get(input_spec.kind)
        if kind is None or (is_written and target in mutated):
            raise WholeProgramError(f"{node.name!r} ({input_spec.kind.name}) is written in place")
        written[node.name] = len(kept)
        kept.append((kind, target, base(value.memory) if is_written else read(mutated[target])))
    results = [read(value) if isinstance(value, Value) else value for _, value in rest]
    # All values are read by now, so that no later read refers to an erased copy.
    gone = {
        node: _without_copy(node)
        for kind, _, node in kept
        if kind is not OutputKind.USER_INPUT_MUTATION
    }
    for copied, source in gone.items():
        # The source of a copy may be a copy that is erased as well.
        while gone.get(source, source) is not source:
            source = gone[source]  # noqa: PLW2901
        gone[copied] = source
    nodes = [gone.get(node, node) for node in (*(node for *_, node in kept), *results)]
    _clone_views_of_written(nodes, written, clone)
    _give_each_its_own(nodes, [kind for kind, *_ in kept], clone)
    specs = [
        OutputSpec(kind, TensorArgument(name=node.name), target)
        for (kind, target, _), node in zip(kept, nodes, strict=False)
    ]
    for (spec, _), node in zip(rest, nodes[len(kept) :], strict=True):
        specs.append(OutputSpec(spec.kind, _argument(spec, node), spec.target))
    return tuple(nodes), ExportGraphSignature(list(old.input_specs), specs)


def _give_each_its_own(
    nodes: list[Any], kinds: list[OutputKind], clone: Callable[[Node], Node]
) -> None:
    """Clone, in the list, a node that is the new value of a second buffer.

    A signature maps the name of an output to one buffer.
    """
    # By kind: an input of the user may take the value of a buffer.
    returned: set[tuple[OutputKind, Node]] = set()
    for position, kind in enumerate(kinds):
        if (kind, nodes[position]) in returned:
            nodes[position] = clone(nodes[position])
        returned.add((kind, nodes[position]))


def _clone_views_of_written(
    nodes: list[Any], written: Mapping[str, int], clone: Callable[[Node], Node]
) -> None:
    """Clone, in the list, outputs that view an input which an earlier output overwrites.

    ``ExportedProgram.module()`` writes the mutated inputs one by one before it returns.
    """
    new_values = {name: nodes[position] for name, position in written.items()}
    clones: dict[Node, Node] = {}
    roots: dict[Node, Node] = {}
    for node in nodes[0].graph.nodes if written else ():
        parent = parent_of(node)
        roots[node] = node if parent is None else roots[parent]
    for position, node in enumerate(nodes):
        root = roots.get(node)
        name = "" if root is None else root.name
        if written.get(name, position) < position and new_values[name] is not root:
            nodes[position] = clones[node] = clones.get(node) or clone(node)


def _without_copy(node: Node) -> Node:
    """Return the source of a copy to a buffer and erase the copy, in place; else the node."""
    if node.target is not torch.ops.aten.copy.default:
        return node
    source: Any = node.args[1]
    copied, value = node.meta["val"], source.meta["val"]
    if copied.shape != value.shape or copied.dtype is not value.dtype:
        # It converts or broadcasts, which torch loses (2.13).
        return node
    if node.users and copied.stride() != value.stride():
        # Its readers take views by its strides. torch erases the copy, and then a view of the
        # source fails or has other elements (2.13).
        return node
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)
    return source  # type: ignore[no-any-return]


def _argument(spec: OutputSpec, node: Any) -> Any:
    if not isinstance(node, Node):
        return ConstantArgument(name=spec.arg.name, value=node)
    recorded = node.meta.get("val")
    kinds = (kind for symbol, kind in _SYMBOL_ARGUMENTS.items() if isinstance(recorded, symbol))
    return next(kinds, TensorArgument)(name=node.name)
