"""Attributes that our modules have besides those of ``torch.nn.Module``."""

from __future__ import annotations

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
