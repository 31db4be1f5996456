"""Every use that this package makes of what is private in torch; each has its test."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from lowerdeck.torch_base import LazyGraphModule

__all__ = [
    "defer_code",
    "generate_code",
    "lazy_graph_module",
    "replace_hooks",
    "share_codegen",
]

_DEFERRED = ("__reduce__", "__reduce_package__", "__str__", "code", "forward", "recompile")


def _no_code(self: GraphModule) -> None:
    """Generate nothing."""


def lazy_graph_module(class_name: str, graph: Graph) -> GraphModule:
    """Return a graph module around ``graph`` that generates its code at its first use.

    Args:
        class_name: Name of its class.
        graph: The graph; what it reads is to be installed in the module afterwards.
    """
    made = GraphModule.__new__(GraphModule)
    own = type(made)
    # The constructor would generate code; each graph module has a class of its own to hold it
    # back.
    own.recompile = _no_code  # type: ignore[assignment]
    GraphModule.__init__(made, {}, Graph(), class_name)
    del own.recompile
    made._graph = graph
    graph.owning_module = made
    defer_code(made)
    return made


def replace_hooks(module: torch.nn.Module | None) -> Sequence[Callable[..., object]]:
    """Return what is to be told, as ``hook(old, new name, user)``, of each input replaced."""
    hooks: Sequence[Callable[..., object]] = getattr(module, "_replace_hooks", ())
    return hooks


def share_codegen(source: Graph, target: Graph) -> None:
    """Let ``target`` generate its signature as ``source`` does (pytree inputs and outputs)."""
    target.set_codegen(source._codegen)


def defer_code(module: GraphModule) -> None:
    """Mark the code of ``module`` as stale: it is generated again at its next use, once.

    torch gives each graph module a class of its own to carry its ``forward``. The same class
    carries here what generates the code first, until ``recompile`` takes it away.

    Args:
        module: A graph module whose graph was edited.
    """
    if isinstance(module, LazyGraphModule):
        module.recompile()
        return
    own = type(module)
    if "recompile" in vars(own):
        return

    def recompile(self: GraphModule) -> Any:
        for name in _DEFERRED:
            if name in vars(own):
                delattr(own, name)
        return self.recompile()

    this = weakref.ref(module)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def generate() -> None:
        # A compiler that traces ``forward`` runs this as it is and goes on with the new code.
        due = this()
        if due is not None:
            recompile(due)

    def forward(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
        generate()
        return self.forward(*args, **kwargs)

    def code(self: GraphModule) -> str:
        recompile(self)
        return self.code

    def text(self: GraphModule) -> str:
        recompile(self)
        return str(self)

    def reduce(self: GraphModule) -> Any:
        recompile(self)
        return self.__reduce__()

    def reduce_package(self: GraphModule, exporter: Any) -> Any:
        recompile(self)
        return self.__reduce_package__(exporter)

    namespace: dict[str, object] = {
        "recompile": recompile,
        "forward": forward,
        "code": property(code),
        "__str__": text,
        "__reduce__": reduce,
        "__reduce_package__": reduce_package,
    }
    for name, value in namespace.items():
        setattr(own, name, value)


def generate_code(module: torch.nn.Module) -> None:
    """Generate the code of ``module`` and of every graph module in it, where that is still due."""
    for inner in module.modules():
        if isinstance(inner, LazyGraphModule):
            inner.real_recompile()  # type: ignore[operator]
        elif isinstance(inner, GraphModule) and "recompile" in vars(type(inner)):
            inner.recompile()
