"""Calls without a signature in the program, whose module somebody replaced: what they give."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.fx import Proxy

from lowerdeck.torch_base import pytree
from lowerdeck.unflatten._torch_private import CALL_MODULE, children_of
from lowerdeck.unflatten.calls.carrying import Generated
from lowerdeck.unflatten.calls.recorded_leaves import Recorded, RecordedTensor
from lowerdeck.unflatten.errors import UnflattenError

FORMER = "_lowerdeck_former"
"""Where a module has what was at the names of its children whose calls it still makes, where that
was deleted or another module is there now."""

FLAT_ADVICE = (
    "Export the model with export_preserving, or put a module there whose forward takes *values, "
    "in the order of their use."
)

_SHOWN = 8
"""How many values a message tells of."""


def told_flat(form: Any) -> str:
    """Return what the calls of a form without a signature give, in a sentence."""
    nodes = form.graph.find_nodes(op="placeholder")
    call: list[Recorded] = list(form.recorded[0] if form.recorded else ())
    leaves = [*call, *[None] * len(nodes)][: len(nodes)]
    values = told_values([node.name for node in nodes], leaves)
    return f"Its call gives flat values, in the order of their first use ({values})."


def told_values(names: Sequence[str], leaves: Sequence[Recorded]) -> str:
    """Return what was recorded of values, each with its name."""
    pairs = zip(names, leaves, strict=True)
    return _shown([f"{name}: {_recorded(leaf)}" for name, leaf in pairs])


def takes(new: torch.nn.Module) -> str:
    """Return what the forward of a module takes, in a sentence."""
    try:
        found = inspect.signature(new.forward)
    except (TypeError, ValueError):
        told = "what it does not tell"
    else:
        # Types of libraries' blocks fill lines.
        bare = [each.replace(annotation=each.empty) for each in found.parameters.values()]
        told = str(inspect.Signature(bare))
    return f"The forward of a {type(new).__name__} takes {told}."


def described(value: Any) -> str:
    """Return what a value is, for messages."""
    if isinstance(value, Proxy):
        return "a Proxy of a symbolic trace, whose value would be ignored"
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(map(str, value.shape))
        return f"a tensor of shape ({sizes}) of {value.dtype}"
    if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
        # Not with all numbers of its tensors.
        return f"a {type(value).__name__} of {len(pytree.tree_leaves(value))} values"
    return repr(value)


def say_how_it_was_called(
    error: BaseException, module: torch.nn.Module, paths: Iterator[str]
) -> None:
    """Raise an error of ours if ``error`` comes of a module that was given flat values unawares.

    What a module raises that says itself what it takes is its own affair.

    Args:
        error: What the code of ``module`` meets.
        module: The module that makes the call.
        paths: The children that it calls.

    Raises:
        UnflattenError: A module that takes any values failed with flat ones, or one that takes
            others was called with them.
    """
    found = _called(error.__traceback__)
    if found is None or isinstance(error, UnflattenError) or type(error).__module__ != "builtins":
        return
    called, given, is_inside = found
    if is_inside and (takes_what_it_tells(called) or any(map(_is_ours, called.modules()))):
        return
    if not is_inside and not isinstance(error, TypeError):
        return
    path = next((each for each in paths if _was_flat(module, each, called)), None)
    if path is None:
        return
    values = _shown([described(value) for value in given])
    raise UnflattenError(
        f"A {type(called).__name__} stands for {path!r}, of which this program has no signature, "
        f"and failed: {type(error).__name__}: {error}\nIts call gives flat values, in the order "
        f"of their first use ({values}). {takes(called)} {FLAT_ADVICE}"
    ) from error


def takes_what_it_tells(module: torch.nn.Module) -> bool:
    """Return whether the forward of a module names all that it takes by position."""
    try:
        found = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    return all(each.kind is not inspect.Parameter.VAR_POSITIONAL for each in found)


def _called(
    traceback: TracebackType | None,
) -> tuple[torch.nn.Module, tuple[Any, ...], bool] | None:
    """Return the child that failed, what it was given, and whether its own code was reached."""
    traceback = traceback.tb_next if traceback is not None else None
    while traceback is not None and traceback.tb_frame.f_code is not CALL_MODULE:
        traceback = traceback.tb_next
    if traceback is None:
        return None
    held = traceback.tb_frame.f_locals
    file, is_inside = traceback.tb_frame.f_code.co_filename, False
    while traceback is not None:
        is_inside |= traceback.tb_frame.f_code.co_filename != file
        traceback = traceback.tb_next
    return held["self"], held["args"], is_inside


def _was_flat(module: torch.nn.Module, path: str, called: torch.nn.Module) -> bool:
    """Return whether ``called`` is at ``path``, where the module's call has no signature."""
    held: Any = module
    parts = path.split(".")
    was_flat = False
    for index, part in enumerate(parts):
        former = held.__dict__.get(FORMER, {}).get(".".join(parts[index:]))
        was_flat |= former is not None
        held = children_of(held).get(part)
        if not isinstance(held, torch.nn.Module):
            return False
    return was_flat and held is called


def _is_ours(module: torch.nn.Module) -> bool:
    return isinstance(module, Generated)


def _recorded(leaf: Recorded) -> str:
    if leaf is None:
        return "a value"
    return f"{leaf} of {leaf.dtype}" if isinstance(leaf, RecordedTensor) else str(leaf)


def _shown(values: list[str]) -> str:
    left = len(values) - _SHOWN
    return "; ".join(values[:_SHOWN]) + (f"; and {left} more" if left > 0 else "") or "none"
