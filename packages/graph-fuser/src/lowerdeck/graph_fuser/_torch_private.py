"""Every use that this package makes of what is private in torch; each has its test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from lowerdeck.torch_base import LazyGraphModule


class _DeferredGraphModule(LazyGraphModule):  # type: ignore[misc,valid-type]
    """torch's lazy graph module, in a form that compilers can trace.

    dynamo refuses to trace torch's ``_lazy_forward``. Here it runs ``real_recompile`` as it is
    and goes on with the new code.
    """

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def real_recompile(self) -> None:
        super().real_recompile()

    def _lazy_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.real_recompile()
        return self.forward(*args, **kwargs)

    forward = _lazy_forward


def lazy_graph_module(class_name: str, graph: Graph) -> GraphModule:
    """Return a graph module around ``graph`` that generates its code at its first use.

    Args:
        class_name: Name of its class.
        graph: The graph; what it reads is to be installed in the module afterwards.
    """
    # Around an empty graph, as the constructor looks for all that the graph reads.
    module: GraphModule = _DeferredGraphModule({}, Graph(), class_name)
    module.graph = graph
    return module


def replace_hooks(module: torch.nn.Module | None) -> Sequence[Callable[..., object]]:
    """Return the hooks to call, as ``hook(old, new name, user)``, for each input replaced."""
    hooks: Sequence[Callable[..., object]] = getattr(module, "_replace_hooks", ())
    return hooks


def defer_code(module: GraphModule) -> None:
    """Mark the code of ``module`` as stale: it is generated again at its next use, once.

    torch gives each graph module its own class to carry its ``forward``; a lazy one replaces
    it. Subclasses of ``GraphModule`` keep theirs, and get their code at once.

    Args:
        module: A graph module whose graph was edited.
    """
    if type(module).__bases__ == (GraphModule,):
        lazy = type(_DeferredGraphModule.__new__(_DeferredGraphModule))
        lazy.__name__ = type(module).__name__
        module.__class__ = lazy
    module.recompile()


def generate_code(module: torch.nn.Module) -> None:
    """Generate the code of ``module`` and of every graph module in it, where that is still due."""
    for inner in module.modules():
        if isinstance(inner, LazyGraphModule):
            inner.real_recompile()  # type: ignore[operator]
