"""Everything private of torch that this package needs, so that a new torch breaks one file."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch._export.passes._node_metadata_hook import _EMPTY_NN_MODULE_STACK_KEY
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.export._remove_effect_tokens_pass import _remove_effect_tokens
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule
from torch.nn.modules import module as _all_modules
from torch.utils._sympy import functions as _size_functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from lowerdeck.torch_base import with_graph_module

__all__ = [
    "AUTOCAST_REGION",
    "CALL_MODULE",
    "EMPTY_STACK_KEY",
    "ENTER_AUTOCAST",
    "EXIT_AUTOCAST",
    "GRAD_MODE_REGION",
    "MovesConstants",
    "NATIVE_FUNCTIONS",
    "SET_GRAD_MODE",
    "SIZE_FUNCTIONS",
    "TRACEPOINT",
    "TRACER_ROOT",
    "bounds_of_size",
    "buffers_of",
    "children_of",
    "has_hooks",
    "is_wrapped_by_transform",
    "hooks_inside",
    "module_state",
    "packet_name",
    "parameters_of",
    "runs_more_than_forward",
    "shares_children_and_state",
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

TRACEPOINT: Any = torch.ops.higher_order._export_tracepoint
"""Returns its arguments: export's mark of what a preserved call takes or returns.

Export takes the marks out and notes what they mark, but for those in a piece that runs in another
mode.
"""

SIZE_FUNCTIONS: Any = _size_functions
"""What export computes sizes with, beside sums, products and powers."""

NATIVE_FUNCTIONS: Any = torch._C._nn
"""Where ``torch.nn.functional`` has its native functions from, such as ``gelu``."""


def bounds_of_size(
    size: Any, limits: Mapping[Any, Sequence[int | None]]
) -> tuple[int | None, int | None]:
    """Return the smallest and the largest that an expression may be; None where any.

    Args:
        size: The expression.
        limits: Both of symbols that have one.
    """
    ends = {}
    for symbol in size.free_symbols:
        low, high = limits.get(symbol, (None, None))
        smallest = 1 if symbol.is_positive else 0
        ends[symbol] = (smallest if low is None else low, int_oo if high is None else high)
    try:
        found = bound_sympy(size, {symbol: ValueRanges(*both) for symbol, both in ends.items()})
    except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError):
        # Of a file: no number may be in a range, or torch may know no bounds of a function.
        return None, None
    low, high = (int(end) if end.is_Integer else None for end in (found.lower, found.upper))
    return low, high


def is_wrapped_by_transform(value: object) -> bool:
    """Return whether ``value`` is a tensor of a level of ``torch.func``, which has no data."""
    wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
    return isinstance(value, torch.Tensor) and wrapped(value)


def packet_name(operator: object) -> str | None:
    """Return the name that all overloads of an operator share, or None for anything else."""
    name: str | None = getattr(operator, "_opname", None)
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


def shares_children_and_state(module: torch.nn.Module, owner: torch.nn.Module) -> None:
    """Let ``module`` hold the children, parameters and buffers of ``owner``, now and later."""
    for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        module.__dict__[name] = owner.__dict__[name]


CALL_MODULE = torch.nn.Module._wrapped_call_impl.__code__
"""The code of what calls a module, with the module and what it is given in its variables."""


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a call of ``module`` runs hooks of its own, or a ``forward`` put there."""
    return bool(
        "forward" in module.__dict__
        or _INSIDE in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def running_backward() -> int:
    """Return which backward pass this thread runs; -1 where it runs none, or is compiled."""
    return -1 if torch.compiler.is_compiling() else int(torch._C._current_graph_task_id())


def runs_more_than_forward(module: torch.nn.Module) -> bool:
    """Return whether a call of ``module`` runs anything but the ``forward`` of its class.

    That may be a hook, of its own or of all modules, a ``forward`` that somebody put in its
    place, or what ``module.compile()`` made.
    """
    return bool(
        has_hooks(module)
        or _all_modules._global_forward_hooks
        or _all_modules._global_forward_pre_hooks
        or _all_modules._global_backward_hooks
        or _all_modules._global_backward_pre_hooks
        or module._compiled_call_impl is not None
    )


_INSIDE = "_lowerdeck_hooks_inside"
"""What a module has while its ``forward`` runs its hooks."""


@contextmanager
def hooks_inside(module: torch.nn.Module) -> Iterator[None]:
    """Let all forward hooks of ``module`` run in its ``forward``, if some come before that."""
    if not module._forward_pre_hooks:
        yield
        return
    cls, state = type(module), module.__dict__
    forward = state.pop("forward", None)
    names = [name for name in state if name.startswith(("_forward_hooks", "_forward_pre_hooks"))]
    held = {name: state[name] for name in names}
    before, after = state["_forward_pre_hooks"], state["_forward_hooks"]
    with_kwargs = {*state["_forward_pre_hooks_with_kwargs"], *state["_forward_hooks_with_kwargs"]}

    # A method, as strict export names the module by how the code comes by it.
    def hooked(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        for number, hook in before.items():
            if number in with_kwargs:
                found = hook(self, args, kwargs)
                args, kwargs = (args, kwargs) if found is None else found
            else:
                found = hook(self, args)
                if found is not None:
                    args = found if isinstance(found, tuple) else (found,)
        if forward is None:
            result = cls.forward(self, *args, **kwargs)
        else:
            result = forward(*args, **kwargs)
        for number, hook in after.items():
            given = (args, kwargs) if number in with_kwargs else (args,)
            found = hook(self, *given, result)
            result = result if found is None else found
        return result

    described = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    module.__class__ = type(cls.__name__, (cls,), {**described, "forward": hooked})
    state.update((name, OrderedDict()) for name in names)
    state[_INSIDE] = True
    try:
        yield
    finally:
        module.__class__ = cls
        del state[_INSIDE]
        state.update(held)
        if forward is not None:
            state["forward"] = forward


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
    own_signature = ExportGraphSignature(
        [replace(spec, arg=copy.copy(spec.arg)) for spec in signature.input_specs],
        [replace(spec, arg=copy.copy(spec.arg)) for spec in signature.output_specs],
    )
    own_module = copy.deepcopy(program.graph_module, shared)
    own = with_graph_module(program, own_module, own_signature)
    without: ExportedProgram = _remove_effect_tokens(own)
    return without


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


class _Moving(threading.local):
    is_inside = False


_EMPTY = [
    torch.empty(0, dtype=dtype, device="cpu")
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
]
_MOVING = _Moving()
"""Whether a module is moved that holds those which are moved now."""


class MovesConstants(torch.nn.Module):
    """A module whose plain tensors follow it to another device, as its buffers do.

    Export lifts what eager creates anew in each call, such as ``torch.tensor([1, 2])``, so that
    nobody else would move it. Types stay: eager's plain tensors keep theirs.
    """

    def _lowerdeck_moving(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Do what is to be done when all tensors become what ``fn`` makes of them."""

    def _lowerdeck_moved_alone(self) -> None:
        """Do what is to be done when this got another type, and what holds it did not."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self._lowerdeck_moving(fn)
        is_outermost, _MOVING.is_inside = not _MOVING.is_inside, True
        try:
            apply: Any = super()._apply
            apply(fn, recurse)
        finally:
            _MOVING.is_inside = not is_outermost
        if is_outermost and any(fn(each).dtype is not each.dtype for each in _EMPTY):
            self._lowerdeck_moved_alone()
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
