"""Uses of private torch APIs; see ``tests/test_torch_private.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from lowerdeck.torch_base import LazyGraphModule, assume_constant_result


class _DeferredGraphModule(LazyGraphModule):  # type: ignore[misc,valid-type]
    """Lazy graph module that dynamo can trace.

    dynamo refuses to trace torch's ``_lazy_forward``. This class runs ``real_recompile`` untraced
    and traces the generated ``forward``.
    """

    @assume_constant_result
    def real_recompile(self) -> None:
        super().real_recompile()

    def _lazy_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.real_recompile()
        return self.forward(*args, **kwargs)

    forward = _lazy_forward


def lazy_graph_module(class_name: str, graph: Graph) -> GraphModule:
    """Return a graph module of ``graph`` whose code is generated at first use.

    Args:
        class_name: Class name of the module.
        graph: The graph; the caller installs the attributes that it reads.
    """
    # Start with an empty graph: the constructor requires every attribute that the graph reads.
    module: GraphModule = _DeferredGraphModule({}, Graph(), class_name)
    module.graph = graph
    return module


def replace_hooks(module: torch.nn.Module | None) -> Sequence[Callable[..., object]]:
    """Return the ``hook(old, new name, user)`` callbacks for replaced node inputs."""
    hooks: Sequence[Callable[..., object]] = getattr(module, "_replace_hooks", ())
    return hooks


def defer_code(module: GraphModule) -> None:
    """Mark the code of ``module`` as stale, to be regenerated at its next use.

    Replaces torch's per-instance class by a lazy one. Subclasses of ``GraphModule`` keep their
    class and are recompiled immediately.

    Args:
        module: A graph module whose graph was edited.
    """
    if type(module).__bases__ == (GraphModule,):
        lazy = type(_DeferredGraphModule.__new__(_DeferredGraphModule))
        lazy.__name__ = type(module).__name__
        module.__class__ = lazy
    module.recompile()


def generate_code(module: torch.nn.Module) -> None:
    """Generate the stale code of ``module`` and all its nested graph modules."""
    for inner in module.modules():
        if isinstance(inner, LazyGraphModule):
            inner.real_recompile()  # type: ignore[operator]
