"""A program in which torch's functionalisation finds every write and every alias.

torch 2.13 makes a program functional by what schemas say, and then takes ``copy`` for its source.
Some things get lost, without a word: what is written through the result of an operator whose
schema hides that it returns its argument, or views of it; the conversion and the broadcasting that
a ``copy_`` does; what is written through an expanded tensor comes out multiplied, and what windows
(``unfold``) leave out becomes zero. Others make it fail: a buffer that becomes an input of the
user, and a tensor that is written and has two names (a buffer, and the constant that a cache's own
attribute was lifted to), or whose part is a buffer of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.fx import GraphModule, Node, map_arg

from lowerdeck.torch_base._torch_private import (
    HigherOrderOperator,
    OperatorBase,
    OpOverload,
    composite_parts,
    schema_of,
    with_graph_module,
)
from lowerdeck.torch_base.behaviours import writes_in_place
from lowerdeck.torch_base.callees import hides_aliases, hides_writes, returns_view
from lowerdeck.torch_base.extents import Extent
from lowerdeck.torch_base.graphs import add_call, copy_graph_module, graphs_of
from lowerdeck.torch_base.hidden_aliases import written_aliases
from lowerdeck.torch_base.memory import MemoryUse, held_tensors
from lowerdeck.torch_base.repeated_writes import (
    ONCE,
    repeated_dims,
    say_windows,
    write_once,
    written_windows,
)

_ATEN = torch.ops.aten
# What shows the same elements, and says so.
_SAFE: Mapping[object, OpOverload] = {
    _ATEN._unsafe_view.default: _ATEN.view.default,
    _ATEN.unsafe_chunk.default: _ATEN.chunk.default,
    _ATEN.unsafe_split.Tensor: _ATEN.split.Tensor,
    _ATEN.unsafe_split_with_sizes.default: _ATEN.split_with_sizes.default,
}


def explicit(program: ExportedProgram, *, copies: bool = True) -> ExportedProgram:
    """Return ``program`` with its aliases and conversions said by operators of their own.

    It computes the same. Give it to torch instead of the original wherever torch is to make it
    functional, such as ``run_decompositions``.

    Args:
        program: Any program; not changed.
        copies: Whether to say what a ``copy_`` converts and broadcasts, and to clone what it takes
            from an input or from what was just written. torch takes the source for the copy, and
            fails on one source of two buffers; who makes a program functional otherwise need not.

    Returns:
        The program itself where there is nothing to say; else a copy on the same tensors.

    Raises:
        RepeatedMemoryError: Several values are written to one element of an expanded tensor.
    """
    nodes = [node for gm in graphs_of(program.graph_module) for node in gm.graph.nodes]
    renamed = _second_names(program)
    if (
        not renamed
        and not any(_unsaid(n, copies) for n in nodes)
        and not any(map(_as_view, written_aliases(program.graph_module)))
        and not any(written_windows(program.graph_module))
    ):
        return program
    copied = copy_graph_module(program.graph_module)
    signature = _merged(program, copied, renamed) if renamed else program.graph_signature
    aliases = written_aliases(copied)
    for node in [*written_windows(copied)]:
        say_windows(node)
    for gm in graphs_of(copied):
        for node in list(gm.graph.nodes):
            say = _as_view(node) if node in aliases else None
            say = _unsaid(node, copies) if say is None else say
            if say is not None:
                say(node)
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


def _unsaid(node: Node, copies: bool) -> Callable[[Node], None] | None:
    """Return what says explicitly what ``node`` does, or None where it does."""
    if node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
        return None
    if node.target is _ATEN.copy_.default and copies:
        source, own = node.args[1], node.args[0]
        if not isinstance(source, Node) or not isinstance(own, Node):
            return _convert
        return None if _alike(source, own) and not _may_have_a_name(source) else _convert
    if node.target in ONCE and repeated_dims(node.args[0]):
        return write_once
    return None


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


def _may_have_a_name(source: Node) -> bool:
    """Return whether a value is an input, or what a write returns: perhaps the memory of one.

    One value that two inputs take would be one output of two names, on which torch fails.
    """
    if source.op == "placeholder":
        return True
    return isinstance(source.target, OpOverload) and schema_of(source.target).is_mutable


def _alike(source: Node, own: Node) -> bool:
    value, held = source.meta.get("val"), own.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and isinstance(held, torch.Tensor)
        and value.dtype is held.dtype
        and value.shape == held.shape
    )


def _alias(node: Node) -> None:
    node.target, node.args, node.kwargs = _ATEN.alias.default, node.args[:1], {}
    if repeated_dims(node.args[0]):
        _show_again(node)
    _forget_own_copies(node)


def _forget_own_copies(shown: Node) -> None:
    """Drop what is copied to itself: eager does nothing, but would refuse to repeat memory."""
    for node in list(shown.users):
        if node.target is _ATEN.copy_.default and _dropped(node.args[0]) is _dropped(node.args[1]):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]  # a node
            node.graph.erase_node(node)


def _dropped(given: object) -> object:
    """Return what a value is an alias of."""
    while isinstance(given, Node) and given.target is _ATEN.alias.default:
        given = given.args[0]
    return given


def _show_again(node: Node) -> None:
    """Give ``node`` and its views values anew: the clone that torch traced repeats no memory."""
    waiting = [node]
    for shown in waiting:
        args, kwargs = map_arg((shown.args, shown.kwargs), lambda given: given.meta["val"])
        shown.meta = {**shown.meta, "val": shown.target(*args, **kwargs)}  # type: ignore[operator]
        waiting += [user for user in shown.users if _is_view(user, shown)]


def _is_view(user: Node, source: Node) -> bool:
    if user.op != "call_function" or not user.args or user.args[0] is not source:
        return False
    if not isinstance(user.target, OpOverload):
        return user.target is operator.getitem
    schema = schema_of(user.target)
    return not schema.is_mutable and (hides_aliases(user.target) or returns_view(user.target))


def _convert(node: Node) -> None:
    own, source = node.args[:2]
    if not isinstance(own, Node) or not isinstance(source, Node):
        return
    held, value = own.meta["val"], source.meta["val"]
    if value.dtype is not held.dtype:
        source = add_call(node, _ATEN.to.dtype, (source, held.dtype))
    if value.shape != held.shape:
        sizes = [
            size if isinstance(size, int) else _size(node, own, dim)
            for dim, size in enumerate(held.shape)
        ]
        source = add_call(node, _ATEN.expand.default, (source, sizes))
    if _may_have_a_name(source):
        source = add_call(node, _ATEN.clone.default, (source,))
    node.args = (own, source, *node.args[2:])


def _size(node: Node, own: Node, dim: int) -> Node:
    return add_call(node, _ATEN.sym_size.int, (own, dim))
