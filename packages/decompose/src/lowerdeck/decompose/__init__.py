"""Decompose exported programs into core operators, tracing each distinct call once."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowerdeck.decompose._torch_private import declines
    from lowerdeck.decompose.cache import DecompositionCache
    from lowerdeck.decompose.decomposing import decompose, decompose_graph, explain, functionalize
    from lowerdeck.decompose.devices import methods_on_cpu, on_cpu
    from lowerdeck.decompose.errors import DecomposeError
    from lowerdeck.decompose.inner_tensors import unwrap_subclass_parameters
    from lowerdeck.decompose.keeping import can_keep
    from lowerdeck.decompose.results import Explanation, Parts
    from lowerdeck.decompose.rules import Rules, keep_whole

__all__ = [
    "DecomposeError",
    "DecompositionCache",
    "Explanation",
    "Parts",
    "Rules",
    "can_keep",
    "declines",
    "decompose",
    "explain",
    "functionalize",
    "methods_on_cpu",
    "on_cpu",
    "keep_whole",
    "decompose_graph",
    "unwrap_subclass_parameters",
]

# Search order: a program without operators to decompose needs the first two modules only.
_MODULES = (
    *("devices", "errors", "keeping", "results", "_torch_private", "rules"),
    *("cache", "decomposing", "inner_tensors"),
)

if not TYPE_CHECKING:  # With ``__getattr__``, a type checker accepts any name.

    def __getattr__(name: str) -> Any:
        """Return a public name, importing its module on first use."""
        for module in _MODULES if name in __all__ else ():
            submodule = importlib.import_module(f"{__name__}.{module}")
            if hasattr(submodule, name):
                globals()[name] = getattr(submodule, name)
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """Return all names, including those not imported yet."""
        return sorted({*globals(), *__all__})
