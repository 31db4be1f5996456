"""Uses of private torch APIs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram

from lowerdeck.torch_base import (
    OpOverload,
    OpOverloadPacket,
    find_schema,
    pytree,
    schema_of,
    written_arguments,
)

__all__ = [
    "SchemaArgument",
    "direct_call",
    "find_overload",
    "flat_graph_inputs",
    "flatten_like",
    "leaf_paths",
    "operator_name",
    "read_structure",
    "schema_arguments",
]


class SchemaArgument(NamedTuple):
    """Argument of an operator schema.

    Attributes:
        type: Type in schema syntax, such as ``Optional[List[int]]``.
        is_written: Whether the operator mutates it.
    """

    name: str
    type: str
    keyword_only: bool
    is_out: bool
    is_written: bool


def find_overload(namespace: str, name: str, overload: str) -> OpOverload | None:
    """Return the operator overload with this name, or None."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(packet, OpOverloadPacket):
        return None
    attribute = overload or "default"
    operator = getattr(packet, attribute, None)
    return operator if isinstance(operator, OpOverload) else None


def operator_name(target: object) -> str | None:
    """Return the name of an operator, such as ``aten::add``, or None for other objects."""
    schema = find_schema(target)
    return None if schema is None else str(schema.name)


def schema_arguments(operator: OpOverload) -> tuple[SchemaArgument, ...]:
    """Return the arguments of ``operator`` in schema order."""
    return tuple(
        SchemaArgument(
            argument.name,
            str(argument.real_type).replace("SymInt", "int"),
            argument.kwarg_only,
            argument.is_out,
            argument.name in written_arguments(operator),
        )
        for argument in schema_of(operator).arguments
    )


def direct_call(operator: OpOverload) -> Callable[..., Any]:
    """Return the C++ callable of ``operator``, which adds no Python frame per call."""
    call: Callable[..., Any] = operator._op
    return call


def read_structure(text: str) -> pytree.TreeSpec | None:
    """Return the structure that ``treespec_dumps`` serialized, or None if it is inconsistent."""
    spec = pytree.treespec_loads(text)
    tree = pytree.tree_unflatten([0] * spec.num_leaves, spec)
    return spec if pytree.tree_structure(tree) == spec else None


def flatten_like(tree: object, spec: pytree.TreeSpec) -> list[Any] | None:
    """Return the leaves of ``tree``, or None unless it has the structure ``spec``."""
    leaves, structure = pytree.tree_flatten(tree)
    return leaves if structure == spec else None


def leaf_paths(spec: pytree.TreeSpec) -> list[str]:
    """Return a readable path to each leaf of ``spec``, such as ``[0][1]['mask']``."""
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]


def flat_graph_inputs(
    program: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sequence[Any]:
    """Return a program's graph inputs: parameters, buffers and constants, then user inputs."""
    flat: Sequence[Any] = program._graph_module_flat_inputs(tuple(args), dict(kwargs))
    return flat
