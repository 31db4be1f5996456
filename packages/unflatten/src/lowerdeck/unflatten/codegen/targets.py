"""Names by which a caller's code reaches a child and one specialization of its call."""

from __future__ import annotations

import keyword
import re
from typing import Any

import torch

from lowerdeck.unflatten._torch_private import buffers_of, children_of, parameters_of
from lowerdeck.unflatten.attributes import PRIVATE

_SPECIALIZATION = re.compile(r"(.+)\.\.(\d+)", re.DOTALL)

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
        "swappable",
        "meta",
        "input_placeholders",
        "graph_signature",
        "module_call_graph",
        "range_constraints",
        "flat_args_adapter",
        "check_input_constraints",
        PRIVATE,
        "__copy__",
        "__getitem__",
    }
)
"""Names of our modules that ``torch.nn.Module`` does not have; a model's own use of one wins.

Names that Python itself looks up on a class, such as ``__copy__``, stay ours.
"""

RESERVED_NAMES: frozenset[str] = (
    frozenset(dir(torch.nn.Module())) | frozenset(keyword.kwlist) | OWN_NAMES
)
"""Names that an attribute access would not look up among a module's children and state."""


def call_target(path: str, specialization: int | None) -> str:
    """Return the target of a call of child ``path``, or of one of its specializations."""
    # No module's path has two dots in a row.
    return path if specialization is None else f"{path}..{specialization}"


def split_call_target(target: str) -> tuple[str, int | None]:
    """Return the child's path and the number of its specialization, or None if it has one."""
    match = _SPECIALIZATION.fullmatch(target) if ".." in target else None
    return (match[1], int(match[2])) if match else (target, None)


def lookup(module: torch.nn.Module, name: str) -> Any:
    """Return the child, parameter or buffer ``name``, even where a method has that name too."""
    for table in (children_of(module), parameters_of(module), buffers_of(module)):
        if name in table:
            # Not from the table: symbolic traces patch this method to record reads.
            return torch.nn.Module.__getattr__(module, name)
    return getattr(module, name)
