"""Attributes that our modules have besides those of ``torch.nn.Module``."""

from __future__ import annotations

from typing import Any

PRIVATE = "_lowerdeck"
"""The code of a generated module."""

NAME = "_lowerdeck_name"
"""The canonical name of a module without code."""

CHECKS = "check_input_constraints"
"""The switch of a module's checks."""

ADAPTER = "flat_args_adapter"
"""The adapter of the outermost module's arguments."""

FUNCTIONS = "_lowerdeck_functions"
"""The functions of a generated class."""


def full_name(module: Any, child: str) -> str:
    """Return the name of a module's child from the root, for messages."""
    state = module.__dict__
    owner = state[PRIVATE].name if PRIVATE in state else state.get(NAME)
    return f"{owner}.{child}" if owner else child
