"""Everything private of torch that this package stands on, so that a new torch breaks one file."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
from torch._export.passes._node_metadata_hook import _EMPTY_NN_MODULE_STACK_KEY
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch._ops import HigherOrderOperator, OpOverload
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.export._remove_effect_tokens_pass import _remove_effect_tokens
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Graph, GraphModule, Node
from torch.nn.modules import module as _all_modules
from torch.utils import _pytree as pytree

__all__ = [
    "AUTOCAST_REGION",
    "EMPTY_STACK_KEY",
    "ENTER_AUTOCAST",
    "EXIT_AUTOCAST",
    "GRAD_MODE_REGION",
    "MovesConstants",
    "NATIVE_FUNCTIONS",
    "SET_GRAD_MODE",
    "TRACER_ROOT",
    "HigherOrderOperator",
    "OpOverload",
    "add_node",
    "buffers_of",
    "children_of",
    "has_hooks",
    "module_state",
    "overload_name",
    "packet_name",
    "parameters_of",
    "pytree",
    "schema_of",
    "storage_key",
    "unsaved_buffers_of",
    "without_effect_tokens",
]

EMPTY_STACK_KEY: str = _EMPTY_NN_MODULE_STACK_KEY
"""Key of the stack that torch's own passes give to nodes whose module they do not know."""

TRACER_ROOT = "_export_root"
"""Name under which strict export's own wrapper holds the user's module.

Module stacks of nodes inside a custom autograd function start there.
"""

AUTOCAST_REGION: Any = wrap_with_autocast
GRAD_MODE_REGION: Any = wrap_with_set_grad_enabled
"""Operators that hold a piece of the graph to be run in another mode."""

ENTER_AUTOCAST: Any = _enter_autocast
EXIT_AUTOCAST: Any = _exit_autocast
SET_GRAD_MODE: Any = torch._C._set_grad_enabled
"""Functions that change the mode; the code writer turns their pairs into ``with`` blocks."""

NATIVE_FUNCTIONS: Any = torch._C._nn
"""Where ``torch.nn.functional`` has its native functions from, such as ``gelu``."""


def schema_of(operator: OpOverload) -> torch.FunctionSchema:
    """Return the schema of one overload of an operator."""
    schema: torch.FunctionSchema = operator._schema
    return schema


def packet_name(operator: object) -> str | None:
    """Return the name that all overloads of an operator share, or None for anything else."""
    name: str | None = getattr(operator, "_opname", None)
    return name


def overload_name(operator: OpOverload) -> str:
    """Return the name of an overload, such as ``"Tensor"``; ``"default"`` when it has none."""
    name: str = operator._overloadname
    return name


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return where ``module`` holds its children, also those whose names are not attributes."""
    return module._modules


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return where ``module`` itself holds its parameters."""
    return module._parameters


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return where ``module`` itself holds its buffers."""
    return module._buffers


def unsaved_buffers_of(module: torch.nn.Module) -> set[str]:
    """Return where ``module`` holds the names of its buffers that no state dict has."""
    return module._non_persistent_buffers_set


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a call of ``module`` runs any hook, of its own or of all modules."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _all_modules._global_forward_hooks
        or _all_modules._global_forward_pre_hooks
        or _all_modules._global_backward_hooks
        or _all_modules._global_backward_pre_hooks
    )


def without_effect_tokens(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` without the tokens that order its effectful operators.

    The program is returned as it is when it has none. Otherwise a copy is changed, for torch's
    pass works in place; the copy shares all state, constants and delegates.
    """
    signature = program.graph_signature
    if not signature.input_tokens and not signature.output_tokens:
        return program
    shared = {
        id(module): module
        for module in program.graph_module.modules()
        if not isinstance(module, GraphModule)
    }
    copied = copy.copy(program)
    copied._graph_module = copy.deepcopy(program.graph_module, shared)
    copied._graph_signature = ExportGraphSignature(
        [replace(spec, arg=copy.copy(spec.arg)) for spec in signature.input_specs],
        [replace(spec, arg=copy.copy(spec.arg)) for spec in signature.output_specs],
    )
    without: ExportedProgram = _remove_effect_tokens(copied)
    return without


def add_node(
    graph: Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: Any, name: str
) -> Node:
    """Add a node at the graph's insert point, as ``Graph.create_node`` does but faster.

    ``Graph.create_node`` flattens all arguments to look for raw symbolic numbers; no exported
    program holds any.

    Args:
        graph: A graph without an owner.
        op: The kind of node.
        target: What it calls or reads.
        args: Positional arguments.
        kwargs: Keyword arguments.
        name: The name wanted; it gets a number if it is taken.
    """
    free = graph._graph_namespace.create_name(name, None)
    made = Node(graph, free, op, target, args, kwargs)
    graph._graph_namespace.associate_name_with_obj(free, made)
    graph._insert(made)
    graph._find_nodes_lookup_table.insert(made)
    graph._len += 1
    return made


def module_state() -> dict[str, Any]:
    """Return what ``torch.nn.Module.__init__`` sets, made several times faster than by it."""
    made = dict(_MODULE_STATE)
    for name, kind in _MODULE_CONTAINERS:
        made[name] = kind()
    return made


_MODULE_STATE: dict[str, Any] = vars(torch.nn.Module())
_MODULE_CONTAINERS = [
    (name, type(value))
    for name, value in _MODULE_STATE.items()
    if isinstance(value, (dict, list, set))
]


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that two tensors have in common exactly when they share memory."""
    return int(tensor.untyped_storage()._cdata)


class MovesConstants(torch.nn.Module):
    """A module whose plain tensors follow it to another device, as its buffers do.

    Export lifts what eager creates anew in each call, such as ``torch.tensor([1, 2])``, so that
    nobody else would move it. Types stay: eager's plain tensors keep theirs.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        apply: Any = super()._apply
        apply(fn, recurse)
        for name, value in self.__dict__.items():
            if isinstance(value, torch.Tensor):
                self.__dict__[name] = _moved(value, fn)
        return self


_HELD = "_lowerdeck_value"
"""Attribute of a tensor without data that holds the data: nothing could load it later."""


def _moved(value: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    held: torch.Tensor = getattr(value, _HELD, value)
    # What ``fn`` makes of a tensor without elements tells the device, at no cost.
    device = fn(torch.empty(0, dtype=held.dtype, device=held.device)).device
    if device == value.device:
        return value
    moved = held.to(device)
    if device.type == "meta":
        setattr(moved, _HELD, held)
    return moved
