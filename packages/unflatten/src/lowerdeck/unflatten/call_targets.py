"""How a parent's code names the child, and the call of it, that it makes."""

from __future__ import annotations

import keyword
import re
from typing import Any

import torch

from lowerdeck.unflatten._torch_private import buffers_of, children_of, parameters_of

_VARIANT = re.compile(r"(.+)\.(_call_\d+)", re.DOTALL)

OWN_NAMES = frozenset(
    {
        "graph",
        "code",
        "recompile",
        "finalize",
        "type_name",
        "print_readable",
        "call_modules",
        "tree_summary",
        "meta",
        "input_placeholders",
        "graph_signature",
        "module_call_graph",
        "range_constraints",
        "flat_args_adapter",
        "check_input_constraints",
    }
)
"""Names that our modules have and ``torch.nn.Module`` has not; a model's own use of one wins."""

RESERVED_NAMES: frozenset[str] = (
    frozenset(dir(torch.nn.Module())) | frozenset(keyword.kwlist) | OWN_NAMES
)
"""Names that an attribute access would not look up among a module's own children and state."""


def call_target(path: str, variant: int) -> str:
    """Return the target of a call of child ``path`` in its ``variant``-th specialised form."""
    return f"{path}._call_{variant}" if variant else path


def split_call_target(target: str) -> tuple[str, str | None]:
    """Return the child's path and the attribute of its specialised form, or None for the first."""
    found = _VARIANT.fullmatch(target)
    return (found[1], found[2]) if found else (target, None)


def lookup(module: torch.nn.Module, name: str) -> Any:
    """Return the child, parameter or buffer ``name``, even where a method has that name too."""
    for held in (children_of(module), parameters_of(module), buffers_of(module)):
        if name in held:
            # Not from ``held``: symbolic traces patch this method to see what is read.
            return torch.nn.Module.__getattr__(module, name)
    return getattr(module, name)
