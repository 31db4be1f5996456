"""Replace tensor subclasses (torchao) by their inner tensors as inputs of a program.

``torch.export`` traces through most subclasses: graphs read only inner tensors, with
``export.access_subclass_inner_tensor``. New placeholders, with the names that
``run_decompositions`` gives them, replace these calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import Node

from lowerdeck.torch_base import (
    copy_graph_module,
    is_traceable_wrapper_subclass,
    set_program_parts,
    with_parts,
)

_ACCESS = "export.access_subclass_inner_tensor.default"
_NAME_PREFIXES = {InputKind.PARAMETER: "p", InputKind.BUFFER: "b"}


def unwrap_subclass_parameters(program: ExportedProgram) -> ExportedProgram:
    """Return a program with inner tensors of tensor subclasses as separate inputs.

    The result is that of ``run_decompositions({})``, without a trace. Programs without subclass
    parameters, or with a node that reads one directly, are returned unchanged.

    Args:
        program: Any program; not changed. Memory is shared.

    Example:
        >>> import torch
        >>> program = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
        >>> unwrap_subclass_parameters(program) is program
        True
    """
    state = {**program.constants, **program.state_dict}
    wrapped = {name for name, tensor in state.items() if is_subclass(tensor)}
    if not wrapped or subclass_reader(program) is not None:
        return program
    copied = with_parts(program, graph_module=copy_graph_module(program.graph_module))
    state_dict, constants = dict(program.state_dict), dict(program.constants)
    specs: list[InputSpec] = []
    placeholders = copied.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.target not in wrapped:
            specs.append(spec)
            continue
        tensors = state_dict if spec.target in state_dict else constants
        tensor = tensors.pop(spec.target)
        module, _, name = spec.target.rpartition(".")
        # Names of torch.nn.utils.parametrize, which run_decompositions uses.
        stem = f"{module}.parametrizations.{name}.original".lstrip(".")
        for count, (path, inner) in enumerate(_leaves(tensor)):
            target = f"{stem}{count}"
            tensors[target] = _as_parameter(inner, tensor)
            placeholder = _placeholder(
                node, path, f"{_NAME_PREFIXES.get(spec.kind, 'c')}_{target}"
            )
            specs.append(replace(spec, arg=TensorArgument(name=placeholder.name), target=target))
        # All users are replaced.
        _erase(node)
    signature = ExportGraphSignature(specs, list(program.graph_signature.output_specs))
    set_program_parts(
        copied, graph_signature=signature, state_dict=state_dict, constants=constants
    )
    return copied


def subclass_reader(program: ExportedProgram) -> tuple[str, Node] | None:
    """Return a tensor subclass's name and a node that reads it directly, or None."""
    placeholders = program.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        target = str(spec.target)
        tensor = program.state_dict.get(target, program.constants.get(target))
        if not is_subclass(tensor):
            continue
        reader = _whole_reader(node)
        if reader is not None:
            return target, reader
    return None


def is_subclass(tensor: object) -> bool:
    """Return whether an object is a traceable wrapper subclass."""
    return isinstance(tensor, torch.Tensor) and is_traceable_wrapper_subclass(tensor)


def _whole_reader(node: Node) -> Node | None:
    for user in node.users:
        if str(user.target) != _ACCESS:
            return user
        inner = _whole_reader(user) if is_subclass(user.meta.get("val")) else None
        if inner is not None:
            return inner
    return None


def _leaves(tensor: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the plain tensors in a tensor subclass, each with its attribute path."""
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if is_subclass(inner):
            yield from _leaves(inner, (*path, name))
        elif isinstance(inner, torch.Tensor):
            yield (*path, name), inner


def _as_parameter(inner: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return an inner tensor, as a parameter if the subclass is one."""
    if not isinstance(tensor, torch.nn.Parameter):
        return inner
    differentiable = tensor.requires_grad and inner.is_floating_point()
    return torch.nn.Parameter(inner, requires_grad=differentiable)


def _placeholder(node: Node, path: tuple[str, ...], name: str) -> Node:
    """Return a new placeholder for an inner tensor, which replaces its access calls."""
    fake, readers = node.meta["val"], [node]
    for attribute in path:
        fake = getattr(fake, attribute)
        readers = [
            user for reader in readers for user in reader.users if user.args[1] == attribute
        ]
    with node.graph.inserting_before(node):
        new_node = node.graph.placeholder(name.replace(".", "_"))
    new_node.target = new_node.name
    new_node.meta = {**node.meta, "val": fake}
    for reader in readers:
        reader.replace_all_uses_with(new_node)
    return new_node


def _erase(node: Node) -> None:
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)
