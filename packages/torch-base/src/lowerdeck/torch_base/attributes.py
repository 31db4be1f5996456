"""Read attributes by their dotted path."""

from __future__ import annotations

import torch


def attribute(module: torch.nn.Module, path: str) -> object:
    """Return the attribute of ``module`` at a dotted path.

    Raises:
        AttributeError: There is none.
    """
    value: object = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def has_attribute(module: torch.nn.Module, path: str) -> bool:
    """Return whether ``module`` has an attribute at a dotted path."""
    value: object = module
    for name in path.split("."):
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True
