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
    """Return what the new graph returns, and the signature that tells it.

    Args:
        program: The original program.
        placeholders: What its placeholders are, after all that was written.
        outputs: What its output node returns, as values.
        read: Gives the node of a value, with all that was written.
        base: Gives the node of a memory, with all that was written.
        clone: Writes a clone of a node.

    Raises:
        WholeProgramError: It writes what a signature cannot tell.
    """
    old = program.graph_signature
    mutated: dict[str, tuple[OutputKind, Any]] = {}
    rest: list[tuple[OutputSpec, Any]] = []
    for spec, value in zip(old.output_specs, outputs, strict=True):
        if spec.kind not in _CALLS:
            raise WholeProgramError(f"an output is a {spec.kind.name}")
        if spec.kind in _MUTATIONS:
            mutated[str(spec.target)] = (spec.kind, value)
        else:
            rest.append((spec, value))
    for (node, value), spec in zip(placeholders.items(), old.input_specs, strict=True):
        if not isinstance(value, Value) or not value.memory.generation:
            continue
        target = str(spec.target or node.name)
        kind = _MUTATION_OF.get(spec.kind)
        if kind is None or target in mutated:
            raise WholeProgramError(f"{node.name!r}, a {spec.kind.name}, is written in place")
        mutated[target] = (kind, value.memory)
    order = {
        str(spec.target or spec.arg.name): position
        for position, spec in enumerate(old.input_specs)
    }
    kept: list[tuple[OutputKind, str, Any]] = []
    # Mutations come first in a signature, in the order of the inputs.
    for target in sorted(mutated, key=order.__getitem__):
        kind, value = mutated[target]
        kept.append((kind, target, read(value) if isinstance(value, Value) else base(value)))
    given = [read(value) if isinstance(value, Value) else value for _, value in rest]
    # All are read by now: a copy that goes is asked for by nobody any more.
    gone = {
        node: _without_copy(node)
        for kind, _, node in kept
        if kind is not OutputKind.USER_INPUT_MUTATION
    }
    for copied, source in gone.items():
        # What was copied may be a copy that went too.
        while gone.get(source, source) is not source:
            source = gone[source]  # noqa: PLW2901
        gone[copied] = source
    nodes = [gone.get(node, node) for node in (*(node for *_, node in kept), *given)]
    positions = {target: position for position, (_, target, _) in enumerate(kept)}
    written = {
        node.name: positions[target]
        for node, spec in zip(placeholders, old.input_specs, strict=True)
        if (target := str(spec.target or node.name)) in positions
    }
    _clone_views_of_written(nodes, written, clone)
    _give_each_its_own(nodes, [kind for kind, *_ in kept], clone)
    specs = [
        OutputSpec(kind, TensorArgument(name=node.name), target)
        for (kind, target, _), node in zip(kept, nodes, strict=False)
    ]
    for (spec, _), node in zip(rest, nodes[len(kept) :], strict=True):
        specs.append(OutputSpec(spec.kind, _argument(spec, node), spec.target))
    return tuple(nodes), ExportGraphSignature(list(old.input_specs), specs)


def update_output_names(signature: ExportGraphSignature, output: Node) -> None:
    """Update the names of a signature's outputs to the nodes that the graph returns, in place.

    Args:
        signature: The signature of the graph before its outputs were replaced.
        output: The output node of the graph.
    """
    returned: Any = output.args[0]
    for spec, node in zip(signature.output_specs, returned, strict=True):
        if isinstance(node, Node):
            spec.arg.name = node.name


def _give_each_its_own(
    nodes: list[Any], kinds: list[OutputKind], clone: Callable[[Node], Node]
) -> None:
    """Let no two buffers become one node, in place: a signature finds a buffer by that."""
    taken: set[tuple[OutputKind, Node]] = set()
    for position, kind in enumerate(kinds):
        if (kind, nodes[position]) in taken:
            nodes[position] = clone(nodes[position])
        taken.add((kind, nodes[position]))


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
    """Return what is copied to a buffer, which has no need of the copy; erase that, in place."""
    if node.target is not torch.ops.aten.copy.default:
        return node
    source: Any = node.args[1]
    copied, held = node.meta["val"], source.meta["val"]
    if copied.shape != held.shape or copied.dtype is not held.dtype:
        # It converts or broadcasts, which torch's own way loses.
        return node
    if node.users and copied.stride() != held.stride():
        # What reads it takes views by its strides: as_strided would see other numbers, and torch,
        # which lets the copy go, fails or is wrong.
        return node
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)
    return source  # type: ignore[no-any-return]


def _argument(spec: OutputSpec, node: Any) -> Any:
    if not isinstance(node, Node):
        return ConstantArgument(name=spec.arg.name, value=node)
    held = node.meta.get("val")
    kinds = (kind for symbol, kind in _SYMBOL_ARGUMENTS.items() if isinstance(held, symbol))
    return next(kinds, TensorArgument)(name=node.name)
