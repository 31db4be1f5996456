"""Outputs and signature of the new program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
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

from lowerdeck.decompose._torch_private import node_source
from lowerdeck.decompose.calls.memory import Value
from lowerdeck.decompose.calls.template import parent_of
from lowerdeck.decompose.errors import WholeProgramError
from lowerdeck.decompose.walk import Walk

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
_SUPPORTED_OUTPUTS = _MUTATIONS | {OutputKind.USER_OUTPUT}


def add_output(
    program: ExportedProgram, walk: Walk, placeholders: Mapping[Node, Any], outputs: Any
) -> ExportGraphSignature:
    """Add the output node to the new graph, and return the graph's signature.

    Args:
        walk: Converter, which has run up to the output.
        placeholders: Values of the placeholders, with pending writes.

    Raises:
        WholeProgramError: A signature cannot express a mutation.
    """
    old = program.graph_signature
    mutated: dict[str, Value] = {}
    user_outputs: list[tuple[OutputSpec, Any]] = []
    for spec, value in zip(old.output_specs, outputs, strict=True):
        if spec.kind not in _SUPPORTED_OUTPUTS:
            raise WholeProgramError(f"an output is a {spec.kind.name}")
        if spec.kind in _MUTATIONS:
            mutated[str(spec.target)] = value
        else:
            user_outputs.append((spec, value))
    # Mutations come first in a signature, in input order.
    mutations: list[tuple[OutputKind, str, Node]] = []
    written: dict[str, int] = {}
    for (node, value), input_spec in zip(placeholders.items(), old.input_specs, strict=True):
        target = str(input_spec.target or node.name)
        is_written = isinstance(value, Value) and value.memory.generation > 0
        if not is_written and target not in mutated:
            continue
        kind = _MUTATION_OF.get(input_spec.kind)
        if kind is None or (is_written and target in mutated):
            raise WholeProgramError(
                f"a signature cannot express the writes to {node.name!r} ({input_spec.kind.name})"
            )
        written[node.name] = len(mutations)
        new_value = walk.base(value.memory) if is_written else walk.current(mutated[target])
        mutations.append((kind, target, new_value))
    results = walk.read([value for _, value in user_outputs])
    last, graph = program.graph.output_node(), walk.writer.graph
    output = graph.output((*(node for *_, node in mutations), *results))
    output.meta.update(last.meta, from_node=[node_source(last)])
    # No value is read after this, so copies can be erased.
    buffers = [node for kind, _, node in mutations if kind is not OutputKind.USER_INPUT_MUTATION]
    for node in dict.fromkeys(buffers):
        _erase_copy(node, output)
    nodes: list[Any] = list(output.args[0])
    with graph.inserting_before(output):
        _clone_views_of_written(nodes, written, partial(walk.clone, source=last))
        _clone_repeated_values(
            nodes, [kind for kind, *_ in mutations], partial(walk.clone, source=last)
        )
    output.args = (tuple(nodes),)
    specs = [
        OutputSpec(kind, TensorArgument(name=node.name), target)
        for (kind, target, _), node in zip(mutations, nodes, strict=False)
    ]
    for (spec, _), node in zip(user_outputs, nodes[len(mutations) :], strict=True):
        specs.append(OutputSpec(spec.kind, _argument(spec, node), spec.target))
    return ExportGraphSignature(list(old.input_specs), specs)


def _clone_repeated_values(
    nodes: list[Any], kinds: list[OutputKind], clone: Callable[[Node], Node]
) -> None:
    """Clone nodes that are the new value of two buffers; update the list in place.

    A signature maps an output name to one buffer.
    """
    # Keyed by kind too: a buffer and a mutated user input may have the same new value.
    returned: set[tuple[OutputKind, Node]] = set()
    for position, kind in enumerate(kinds):
        if (kind, nodes[position]) in returned:
            nodes[position] = clone(nodes[position])
        returned.add((kind, nodes[position]))


def _clone_views_of_written(
    nodes: list[Any], written: Mapping[str, int], clone: Callable[[Node], Node]
) -> None:
    """Clone outputs that view an input which an earlier output overwrites; update the list.

    ``ExportedProgram.module()`` writes mutated inputs one by one before it returns.
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


def _erase_copy(node: Node, output: Node) -> None:
    """Replace a copy to a buffer by its source, in place."""
    if node.target is not torch.ops.aten.copy.default:
        return
    source: Any = node.args[1]
    copied, value = node.meta["val"], source.meta["val"]
    if copied.shape != value.shape or copied.dtype is not value.dtype:
        # The copy converts or broadcasts, which torch 2.13 loses.
        return
    if node.users.keys() - {output} and copied.stride() != value.stride():
        # Users rely on the copy's strides. torch 2.13 erases it, and views of the source then fail
        # or have other elements.
        return
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)


def _argument(spec: OutputSpec, node: Any) -> Any:
    if not isinstance(node, Node):
        return ConstantArgument(name=spec.arg.name, value=node)
    recorded = node.meta.get("val")
    kinds = (kind for symbol, kind in _SYMBOL_ARGUMENTS.items() if isinstance(recorded, symbol))
    return next(kinds, TensorArgument)(name=node.name)
