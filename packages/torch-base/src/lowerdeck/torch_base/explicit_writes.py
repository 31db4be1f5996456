"""Programs in which torch's functionalization finds every alias of memory that is written.

torch 2.13 makes a program functional by what schemas say. What is written through the result of an
operator whose schema hides that it returns its argument, or views of it, is lost. A tensor that is
written and has two names (a buffer, and the constant that a cache's own attribute was lifted to),
or whose part is a buffer of its own, makes it fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.fx import GraphModule, Node

from lowerdeck.torch_base._torch_private import (
    OperatorBase,
    OpOverload,
    composite_parts,
    with_graph_module,
)
from lowerdeck.torch_base.behaviours import writes_in_place
from lowerdeck.torch_base.callees import hides_aliases, hides_writes
from lowerdeck.torch_base.extents import Extent
from lowerdeck.torch_base.graphs import add_call, copy_graph_module, graphs_of
from lowerdeck.torch_base.hidden_aliases import written_aliases
from lowerdeck.torch_base.memory import MemoryUse, held_tensors

_ATEN = torch.ops.aten
# What shows the same elements, and says so.
_SAFE: Mapping[object, OpOverload] = {
    _ATEN._unsafe_view.default: _ATEN.view.default,
    _ATEN.unsafe_chunk.default: _ATEN.chunk.default,
    _ATEN.unsafe_split.Tensor: _ATEN.split.Tensor,
    _ATEN.unsafe_split_with_sizes.default: _ATEN.split_with_sizes.default,
}


def explicit(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with one input for each memory, and views where schemas hide aliases.

    It computes the same. Give it to torch instead of the original wherever torch is to make it
    functional, such as ``run_decompositions``.

    Args:
        program: Any program; not changed.

    Returns:
        The program itself where nothing is hidden; else a copy on the same tensors.
    """
    renamed = _second_names(program)
    if not renamed and not any(map(_as_view, written_aliases(program.graph_module))):
        return program
    copied = copy_graph_module(program.graph_module)
    signature = _merged(program, copied, renamed) if renamed else program.graph_signature
    for node in written_aliases(copied):
        replace_call = _as_view(node)
        if replace_call is not None:
            replace_call(node)
    return with_graph_module(program, copied, signature)


def aliasing_parts(program: ExportedProgram) -> dict[OperatorBase, Callable[..., object]]:
    """Return how to take apart the composites of ``program`` whose schemas hide what they do.

    For the table of ``run_decompositions``, which would keep them whole.

    Args:
        program: Any program.
    """
    table: dict[OperatorBase, Callable[..., object]] = {}
    for gm in graphs_of(program.graph_module):
        for node in gm.graph.nodes:
            if hides_aliases(node.target) or hides_writes(node.target):
                parts = composite_parts(node.target)
                if parts is not None:
                    table[node.target] = parts
    return table


@dataclass(frozen=True, slots=True)
class _Name:
    """What a placeholder is a further name of.

    Attributes:
        first: The name of the placeholder that stands for the memory.
        offset: The element of it, in memory's order, that comes first; None for the whole.
        shape: The shape of a part.
    """

    first: str
    offset: int | None = None
    shape: tuple[int, ...] = ()


def _second_names(program: ExportedProgram) -> dict[str, _Name]:
    """Return the placeholders that are further names of a tensor that is written, or of its parts.

    A parameter or buffer comes before others, else what the program lists first; what holds a part
    comes before the part.
    """
    if not writes_in_place(program.graph_module):
        return {}
    memory = MemoryUse.of_program(program)
    held = {node: value for node, value in held_tensors(program).items() if memory.writers(node)}
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    together: dict[Node, list[Node]] = {}
    for node in held:
        together.setdefault(memory.group(node), []).append(node)
    found: dict[str, _Name] = {}
    for nodes in together.values():
        extents = {node: Extent.of(held[node]) for node in nodes}
        first, *others = sorted(
            nodes,
            key=lambda node: (
                extents[node].start - extents[node].end,
                kinds[node.name] == InputKind.CONSTANT_TENSOR,
            ),
        )
        for node in others:
            if not node.users:
                continue  # Nobody asks by this name: the signature stays as it is.
            if kinds[node.name] != kinds[first.name] == InputKind.CONSTANT_TENSOR:
                continue  # A constant cannot take what a buffer does.
            name = _name(first, held[first], held[node], extents[first], extents[node])
            if name is not None:
                found[node.name] = name
    return found


def _name(
    first: Node, whole: torch.Tensor, part: torch.Tensor, around: Extent, inside: Extent
) -> _Name | None:
    """Return how ``part`` is told of ``whole``, or None where views of values cannot tell it."""
    if whole.dtype is not part.dtype or around.space != inside.space:
        return None
    if (whole.shape, whole.stride(), around) == (part.shape, part.stride(), inside):
        return _Name(first.name)
    offset, rest = divmod(inside.start - around.start, whole.element_size())
    within = around.start <= inside.start and inside.end <= around.end and not rest
    if not within or not whole.is_contiguous() or not part.is_contiguous():
        return None
    return _Name(first.name, offset, tuple(part.shape))


def _merged(
    program: ExportedProgram, graph_module: GraphModule, renamed: dict[str, _Name]
) -> ExportGraphSignature:
    """Let one placeholder stand for all names of a memory, in place; return the signature."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    by_name = {node.name: node for node in placeholders}
    begin = placeholders[-1].next
    for name, known in renamed.items():
        value = by_name[known.first]
        if known.offset is not None:
            count = by_name[name].meta["val"].numel()
            value = add_call(begin, _ATEN.view.default, (value, [-1]))
            bounds = (0, known.offset, known.offset + count)
            value = add_call(begin, _ATEN.slice.Tensor, (value, *bounds))
            value = add_call(begin, _ATEN.view.default, (value, list(known.shape)))
        by_name[name].replace_all_uses_with(value)
        graph_module.graph.erase_node(by_name[name])
    signature = program.graph_signature
    kept = [spec for spec in signature.input_specs if spec.arg.name not in renamed]
    return ExportGraphSignature(kept, list(signature.output_specs))


def _is_idle_dropout(node: Node) -> bool:
    if node.op != "call_function" or not hides_aliases(node.target):
        return False
    # Not in training, or nothing is dropped.
    idle = any(given == 0 for given in (*node.args[1:], *node.kwargs.values()))
    return "dropout" in str(node.target) and idle


def _as_view(node: Node) -> Callable[[Node], None] | None:
    """Return what says that a call gives views, or None where no single operator tells them.

    Eager's dropout returns its argument where it drops nothing, and torch's decomposition a clone.
    Where nothing is written later that is the same, and operators are left as torch has them.

    Args:
        node: A call whose result, or what it shows, is written later.
    """
    if node.target in _SAFE:
        return _say_safe
    return _alias if _is_idle_dropout(node) else None


def _say_safe(node: Node) -> None:
    node.target = _SAFE[node.target]


def _alias(node: Node) -> None:
    node.target, node.args, node.kwargs = _ATEN.alias.default, node.args[:1], {}
