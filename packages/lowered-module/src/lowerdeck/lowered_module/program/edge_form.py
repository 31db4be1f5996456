"""Convert programs to ExecuTorch's Edge dialect and back.

Partitioners written for ExecuTorch compare with operators of the Edge dialect, in which views are
copies and scalar operands are tensors. Programs are converted for them; afterwards nodes that were
not delegated get their original operators and scalars back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Graph, GraphModule, Node

from lowerdeck.lowered_module._executorch import (
    edge_dialect_is_loaded,
    edge_operator,
    edge_verifier,
    in_edge_dialect,
    is_allocation,
)
from lowerdeck.lowered_module._torch_private import fake_mode_of
from lowerdeck.lowered_module.program.constants import add_constants
from lowerdeck.lowered_module.program.copies import shared_copy
from lowerdeck.lowered_module.program.functional import functional
from lowerdeck.lowered_module.program.graphs import inputs_of, nodes_of
from lowerdeck.torch_base import (
    OpOverload,
    graphs_of,
    renamed_outputs,
    repair_program,
    reserve_name,
    schema_of,
    set_program_parts,
)

# Keys of node metadata: the original operator, and the scalar arguments.
_CALLED = "lowerdeck_called"
_NUMBERS = "lowerdeck_numbers"
# Key of placeholder metadata: the scalar in the tensor.
_NUMBER = "lowerdeck_number"
# Key of graph module metadata: the original verifiers.
_VERIFIERS = "lowerdeck_verifiers"


@contextlib.contextmanager
def without_edge_operators(program: ExportedProgram) -> Iterator[bool]:
    """Temporarily replace operators of ExecuTorch's Edge dialect by torch's.

    Yields:
        Whether the program has operators of the Edge dialect.
    """
    changed = []
    for node in _calls(program.graph_module):
        operator = edge_operator(node.target)
        if operator is not None:
            changed.append((node, node.target))
            node.target = operator
    try:
        yield bool(changed)
    finally:
        for node, target in changed:
            node.target = target


def edge_form(program: ExportedProgram) -> ExportedProgram:
    """Return a functional program in ExecuTorch's Edge dialect, with the same tensor objects.

    A program that is already in the Edge dialect is returned itself.
    """
    if any(edge_operator(node.target) for node in _calls(program.graph_module)):
        return program
    copied = shared_copy(program)
    _lift_numbers(copied)
    for node in _calls(copied.graph_module):
        edge_operator_ = (
            in_edge_dialect(node.target) if isinstance(node.target, OpOverload) else None
        )
        if edge_operator_ is not None:
            node.meta[_CALLED] = node.target
            node.target = edge_operator_
    copied.graph_module.meta[_VERIFIERS] = list(copied.verifiers)
    set_program_parts(copied, verifiers=[edge_verifier()])
    return copied


def leave_edge_form(program: ExportedProgram, parts: Iterable[ExportedProgram] = ()) -> None:
    """Restore, in place, the operators and scalars that :func:`edge_form` replaced.

    A call whose operator was replaced since then gets torch's operator of the same name.

    Args:
        program: A program from :func:`edge_form`, possibly changed; other programs are left
            unchanged.
        parts: Partitions of the program; their inputs are not changed.
    """
    verifiers = program.graph_module.meta.pop(_VERIFIERS, None)
    if verifiers is None:
        return
    for part in (*parts, program):
        for node in _calls(part.graph_module):
            _give_back(node)
        set_program_parts(part, verifiers=verifiers)
    _drop_unused(program)


def _give_back(node: Node) -> None:
    called, numbers = node.meta.pop(_CALLED, None), node.meta.pop(_NUMBERS, {})
    operator = edge_operator(node.target)
    if is_allocation(node.target):
        _allocate(node)
    # No Edge operator: a getitem on a partition's call has the metadata of the node that it
    # replaces.
    if operator is None:
        return
    if called is None or in_edge_dialect(called) is not node.target:
        node.target = operator
        return
    node.target = called
    for index, argument in enumerate(node.args):
        if index in numbers and isinstance(argument, Node) and _NUMBER in argument.meta:
            node.update_arg(index, argument.meta[_NUMBER])


def _allocate(node: Node) -> None:
    """Replace exir's allocation by torch's."""
    specification: Any = node.args[0]
    shape, dtype = specification
    node.target = torch.ops.aten.empty.memory_format
    node.args, node.kwargs = (list(shape),), {"dtype": dtype}
    mode = fake_mode_of([other.meta.get("val") for other in node.graph.nodes])
    with mode or contextlib.nullcontext():
        node.meta["val"] = torch.empty(shape, dtype=dtype)


def changed_as_in_exir(
    program: ExportedProgram, change: Callable[[ExportedProgram], ExportedProgram]
) -> ExportedProgram:
    """Apply a pass that was written for ``executorch.exir`` to a program.

    The pass gets the program in the Edge dialect; unchanged nodes of its result get their original
    operators back.

    Args:
        program: Any program; not changed.
        change: The pass; it may change its argument in place and returns the result.

    Raises:
        AliasingError: The program has an in-place write that cannot be functionalized.
    """
    program = functional(repair_program(program))
    displayed = edge_form(program)
    if displayed is program:
        return change(program)
    changed = change(displayed)
    # A pass may return a new module without the metadata.
    changed.graph_module.meta[_VERIFIERS] = list(program.verifiers)
    leave_edge_form(changed)
    return changed


def in_edge_operators(program: ExportedProgram) -> ExportedProgram:
    """Return a program in the Edge dialect, with nodes named as in ``executorch.exir``.

    :func:`in_torch_operators` is the inverse.

    Args:
        program: Any program; not changed, and returned itself if it is in that dialect, or if the
            dialect was not imported.

    Raises:
        AliasingError: The program has an in-place write that cannot be functionalized.
    """
    if not edge_dialect_is_loaded():
        return program
    program = functional(repair_program(program))
    if program.dialect == "EDGE":
        return program
    edge = edge_form(program)
    edge = shared_copy(program) if edge is program else edge
    # With this key, `to_backend` would convert its result back to torch's operators.
    edge.graph_module.meta.pop(_VERIFIERS, None)
    for gm in graphs_of(edge.graph_module):
        _name_calls(gm.graph)
    signature = renamed_outputs(edge.graph_signature, edge.graph)
    set_program_parts(edge, graph_signature=signature, verifiers=[edge_verifier()])
    return edge


def _name_calls(graph: Graph) -> None:
    """Name calls of the Edge dialect after their operators, as exir does."""
    names = {node.name for node in graph.nodes}
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if node.op != "call_function" or edge_operator(node.target) is None:
            continue
        stem = node.target.__name__.replace(".", "_").lower()
        name = stem
        while name in names:
            counts[stem] = counts.get(stem, 0) + 1
            name = f"{stem}_{counts[stem]}"
        names.add(name)
        reserve_name(graph, name)
        node.name = name


def in_torch_operators(program: ExportedProgram) -> ExportedProgram:
    """Convert a program of ExecuTorch's Edge dialect to ATen operators; others are unchanged.

    Calls not modified since :func:`in_edge_operators` get their original operators and scalar
    arguments back.

    Args:
        program: Any program; not changed.
    """
    if program.dialect != "EDGE" and not any(
        edge_operator(node.target) for node in _calls(program.graph_module)
    ):
        return program
    copied = shared_copy(program)
    copied.graph_module.meta[_VERIFIERS] = aten_verifiers(program)
    leave_edge_form(copied)
    return copied


def aten_verifiers(program: ExportedProgram) -> list[Any]:
    """Return the verifiers of a program after its conversion to ATen operators."""
    # Verifiers of the Edge dialect derive from torch's.
    return [
        next(base for base in cls.__mro__ if getattr(base, "dialect", None) != "EDGE")
        for cls in program.verifiers
    ]


def _calls(graph_module: GraphModule) -> list[Node]:
    return [node for node in nodes_of(graph_module) if node.op == "call_function"]


def _lift_numbers(program: ExportedProgram) -> None:
    """Replace scalar operands in the outermost graph by constant tensors."""
    numbers = [
        (node, index, tensor)
        for node in program.graph.nodes
        if node.op == "call_function"
        for index, tensor in _numbers(node)
    ]
    placeholders = add_constants(program, [tensor for _, _, tensor in numbers])
    for (node, index, _), placeholder in zip(numbers, placeholders, strict=True):
        number = placeholder.meta[_NUMBER] = node.args[index]
        node.meta[_NUMBERS] = {**node.meta.get(_NUMBERS, {}), index: number}
        node.update_arg(index, placeholder)


def _numbers(node: Node) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the scalar operands of a call, as tensors of the other operand's dtype.

    Half precision is excluded: a scalar operand is exact, but a half-precision tensor is not.
    """
    values = [source.meta.get("val") for source in node.all_input_nodes]
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    if not isinstance(node.target, OpOverload) or not is_tensor or len(dtypes) != 1:
        return
    (dtype,) = dtypes
    numbers = (int, float) if dtype.is_floating_point else (int,)
    if dtype not in (torch.float32, torch.float64, torch.int32, torch.int64):
        return
    arguments = schema_of(node.target).arguments
    for index, (source, argument) in enumerate(zip(node.args, arguments, strict=False)):
        is_for_tensor = str(argument.type) in {"Tensor", "Optional[Tensor]"}
        if type(source) in numbers and is_for_tensor:
            yield index, torch.tensor(source, dtype=dtype)


def _drop_unused(program: ExportedProgram) -> None:
    """Remove unread tensors of scalars."""
    specs, constants = [], dict(program.constants)
    for node, spec in inputs_of(program):
        if _NUMBER in node.meta and not node.users:
            constants.pop(str(spec.target), None)
            program.graph.erase_node(node)
        else:
            specs.append(spec)
    if len(specs) == len(program.graph_signature.input_specs):
        return
    signature = ExportGraphSignature(specs, list(program.graph_signature.output_specs))
    set_program_parts(program, graph_signature=signature, constants=constants)
