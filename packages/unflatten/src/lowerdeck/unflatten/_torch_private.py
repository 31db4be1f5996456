"""Uses of private torch APIs, to be checked with each torch release."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self

import torch
from torch._export.passes._node_metadata_hook import _EMPTY_NN_MODULE_STACK_KEY
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.export._unlift import _convert_guards_code_to_fn, _get_input_guards_for_graph
from torch.export.exported_program import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.nn.modules.module import _has_any_global_hook

from lowerdeck.torch_base import pytree

__all__ = [
    "AUTOCAST_REGION",
    "EMPTY_STACK_KEY",
    "ENTER_AUTOCAST",
    "EXIT_AUTOCAST",
    "GRAD_MODE_REGION",
    "NATIVE_FUNCTIONS",
    "SET_GRAD_MODE",
    "TRACEPOINT",
    "TRACER_ROOT",
    "Movable",
    "buffers_of",
    "call_being_traced",
    "calls_are_observed",
    "children_of",
    "guard_function",
    "is_decomposed",
    "module_state",
    "node_of",
    "packet_name",
    "parameters_of",
    "size_conditions",
    "size_guards",
    "unsaved_buffers_of",
]

EMPTY_STACK_KEY: str = _EMPTY_NN_MODULE_STACK_KEY
"""Key of the module stack that torch's passes give to nodes of unknown modules."""

TRACER_ROOT = "_export_root"
"""Attribute of strict export's wrapper for the user's module.

Module stacks of nodes inside a custom autograd function start at it.
"""

AUTOCAST_REGION: Any = wrap_with_autocast
GRAD_MODE_REGION: Any = wrap_with_set_grad_enabled
"""Higher-order operators that run a subgraph under another mode (no_grad, autocast)."""

ENTER_AUTOCAST: Any = _enter_autocast
EXIT_AUTOCAST: Any = _exit_autocast
SET_GRAD_MODE: Any = torch._C._set_grad_enabled
"""Functions that enter or exit a mode; codegen emits each pair as a ``with`` block."""

TRACEPOINT: Any = torch.ops.higher_order._export_tracepoint
"""Identity operator (tracepoint) on arguments and results of calls with a preserved signature.
Export removes tracepoints, except in mode regions.
"""

NATIVE_FUNCTIONS: Any = torch._C._nn
"""Native functions of ``torch.nn.functional``, such as ``gelu``."""


def is_decomposed(program: ExportedProgram) -> bool:
    """Return whether ``run_decompositions`` or a lowering pass rewrote the program.

    These passes rename nodes, so recorded signatures no longer match the graph.
    """
    return str(program.dialect) != "TRAINING"


def packet_name(operator: object) -> str | None:
    """Return the name of an operator's overload packet, or None for other objects."""
    name: str | None = getattr(operator, "_opname", None)
    return name


def calls_are_observed() -> bool:
    """Return whether calling a module without hooks may run more than ``forward``.

    Tracers and exports replace ``__call__``, other tools register global hooks, the profiler
    records calls.
    """
    cls: Any = torch.nn.Module
    return bool(
        torch.compiler.is_compiling()
        or cls.__call__ is not cls._wrapped_call_impl
        or torch._C._get_tracing_state()
        or torch.autograd.profiler._is_profiler_enabled
        or _has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return the dict of children, including names hidden from attribute access."""
    return module._modules


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return the dict of the module's own parameters."""
    return module._parameters


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dict of the module's own buffers."""
    return module._buffers


def unsaved_buffers_of(module: torch.nn.Module) -> set[str]:
    """Return the names of non-persistent buffers."""
    return module._non_persistent_buffers_set


def call_being_traced() -> tuple[str, str]:
    """Return the path of the module that non-strict export traces, and the name of its call.

    The call's name is its key in the module call graph: the path, or ``path@index`` for repeated
    calls. Both are "" outside of a trace.
    """
    mode: Any = get_proxy_mode()
    stack = getattr(mode.tracer, "module_stack", None) if mode is not None else None
    if not stack:
        return "", ""
    key, (path, _) = next(reversed(stack.items()))
    prefix = f"{TRACER_ROOT}."
    return path.removeprefix(prefix), key.removeprefix(prefix)


def node_of(value: torch.Tensor) -> Node | None:
    """Return the trace's node for a tensor, or None for a constant."""
    mode: Any = get_proxy_mode()
    slot: Any = get_proxy_slot(value, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def size_guards(placeholders: Sequence[Node], ranges: Any, names: Sequence[str]) -> list[str]:
    """Return torch's guards on flat inputs as Python expressions over ``L['name']``.

    Args:
        placeholders: Placeholder of each user input, with its example value.
        ranges: Range of each symbol.
        names: Unique name of each user input.
    """
    paths: list[Any] = [(pytree.MappingKey(name),) for name in names]
    guards: list[str] = _get_input_guards_for_graph(list(placeholders), ranges, paths)
    return guards


def guard_function(guards: Sequence[str], names: Sequence[str]) -> Callable[..., None]:
    """Return a function that checks guards on its arguments, as ``program.module()`` does.

    It raises ``AssertionError`` for a violated guard.

    Args:
        guards: Python expressions over ``L['name']``.
        names: Unique name of each user input.
    """
    paths: list[Any] = [(pytree.MappingKey(name),) for name in names]
    function: Callable[..., None] = _convert_guards_code_to_fn(list(guards), paths).forward
    return function


class Movable(torch.nn.Module):
    """Base of modules that are notified when they are moved."""

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        apply: Any = super()._apply
        apply(fn, recurse)
        self._lowerdeck_moved(fn)
        return self

    def _lowerdeck_moved(self, fn: Any) -> None:
        """Move tensors outside of torch's parameter and buffer dicts.

        Args:
            fn: The function that torch applied to each parameter and buffer.
        """


def module_state() -> dict[str, Any]:
    """Return the attributes that ``torch.nn.Module.__init__`` sets, at a fraction of its cost.

    Rarely used attributes are created by ``Movable`` at their first read.
    """
    state = _MODULE_STATE.copy()
    for name, kind in _MODULE_TABLES:
        state[name] = kind()
    return state


_MODULE_STATE: dict[str, Any] = vars(torch.nn.Module())
for _name in [name for name in _MODULE_STATE if re.search("state_dict|kwargs|always", name)]:
    # Half of a module's objects; only state dicts and calls with hooks read these.
    del _MODULE_STATE[_name]
    setattr(Movable, _name, cached_property(lambda _: OrderedDict[int, Any]()))
    vars(Movable)[_name].__set_name__(Movable, _name)
_MODULE_TABLES = [
    (name, type(value))
    for name, value in _MODULE_STATE.items()
    if isinstance(value, (dict, list, set))
]


def size_conditions(program: ExportedProgram) -> list[str]:
    """Return the recorded guards on input sizes as Python expressions."""
    return list(dict.fromkeys(program._guards_code))
