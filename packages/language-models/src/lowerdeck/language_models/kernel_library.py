"""Register kernels of optional runtime libraries with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def define(namespace: str, name: str, arguments: str, computed: Callable[..., Any]) -> None:
    """Register an operator that returns one tensor, and its out-variant, with torch.

    An existing definition, such as ExecuTorch's own, is kept.

    Args:
        arguments: Arguments in torch's schema language.
        computed: Eager implementation, also for fake tensors.
    """
    if hasattr(getattr(torch.ops, namespace), name):
        return

    def written(*args: Any, out: torch.Tensor, **named: Any) -> torch.Tensor:
        result = computed(*args, **named)
        return out.resize_(result.shape).copy_(result)

    library: Any = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(f"{name}({arguments}) -> Tensor")
    library.define(f"{name}.out({arguments}, *, Tensor(z!) out) -> Tensor(z!)")
    library.impl(name, computed, "CompositeExplicitAutograd")
    library.impl(f"{name}.out", written, "CPU")
    _LIBRARIES.append(library)


_LIBRARIES: list[Any] = []
"""Keeps the libraries alive, and with them the definitions."""
