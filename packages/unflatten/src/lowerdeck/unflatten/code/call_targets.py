"""How a parent's code names the child, and the call of it, that it makes."""

from __future__ import annotations

import keyword
import re
from typing import Any

import torch

from lowerdeck.unflatten._torch_private import buffers_of, children_of, parameters_of

_FORM = re.compile(r"_call_\d+")
_VARIANT = re.compile(r"(.+)\.\.(\d+)", re.DOTALL)

OWN_NAMES = frozenset(
    {
        "graph",
        "graph_module",
        "code",
        "recompile",
        "finalize",
        "type_name",
        "print_readable",
        "call_modules",
        "tree_summary",
        "swappable",
        "meta",
        "input_placeholders",
        "graph_signature",
        "module_call_graph",
        "range_constraints",
        "flat_args_adapter",
        "check_input_constraints",
        "_lowerdeck",
        "_lowerdeck_generated_class",
        "_lowerdeck_moved_alone",
        "_lowerdeck_moving",
        "_lowerdeck_check",
        "_lowerdeck_former",
        "_lowerdeck_uncalled",
        "_lowerdeck_holders",
        "__copy__",
        "__getitem__",
    }
)
"""Names that our modules have and ``torch.nn.Module`` has not; a model's own use of one wins.

What Python itself asks a class for, such as ``__copy__``, stays ours there.
"""

RESERVED_NAMES: frozenset[str] = (
    frozenset(dir(torch.nn.Module())) | frozenset(keyword.kwlist) | OWN_NAMES
)
"""Names that an attribute access would not look up among a module's own children and state."""


def call_target(path: str, form: int | None) -> str:
    """Return the target of a call of child ``path``, in one of its forms if it has several."""
    # No module's path has two dots in a row, and few calls have a form.
    return path if form is None else f"{path}..{form}"


def form_name(number: int) -> str:
    """Return the attribute that calls a form; a model's own use of it is read by ``lookup``."""
    return f"_call_{number}"


def is_reserved(name: str) -> bool:
    """Return whether an attribute access may find something else than a child or state."""
    return name in RESERVED_NAMES or _FORM.fullmatch(name) is not None


def split_call_target(target: str) -> tuple[str, int | None]:
    """Return the child's path and which of its forms is called, or None if it has one."""
    found = _VARIANT.fullmatch(target) if ".." in target else None
    return (found[1], int(found[2])) if found else (target, None)


def lookup(module: torch.nn.Module, name: str) -> Any:
    """Return the child, parameter or buffer ``name``, even where a method has that name too."""
    for held in (children_of(module), parameters_of(module), buffers_of(module)):
        if name in held:
            # Not from ``held``: symbolic traces patch this method to see what is read.
            return torch.nn.Module.__getattr__(module, name)
    return getattr(module, name)
