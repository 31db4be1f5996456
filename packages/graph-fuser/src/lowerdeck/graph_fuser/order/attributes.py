"""Install attributes by their dotted path."""

from __future__ import annotations

import torch


def install(module: torch.nn.Module, path: str, value: object) -> None:
    """Set the attribute of ``module`` at a dotted path; plain tensors become buffers.

    Args:
        path: Dotted path; missing parent modules are created.
    """
    *holders, name = path.split(".")
    for holder in holders:
        inner = getattr(module, holder, None)
        if not isinstance(inner, torch.nn.Module):
            inner = torch.nn.Module()
            module.add_module(holder, inner)
        module = inner
    # Two targets may share a module that already has the attribute.
    if getattr(module, name, None) is value and value is not None:
        return
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        module.register_buffer(name, value)
    elif isinstance(value, torch.nn.Module):
        module.add_module(name, value)
    else:
        setattr(module, name, value)
