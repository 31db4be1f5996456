"""Interoperation with ExecuTorch's classes, in any order of imports.

This module never imports ExecuTorch. Code that passes an object of an ExecuTorch class has
imported the module that defines the class, so it suffices to check whether that module is loaded.
The check is made at each call, because the module may be imported later.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from lowerdeck.torch_base import OpOverload, overload_name, returns_alias, schema_of


def _loaded(module: str, name: str) -> Any:
    """Return an attribute of an exir module, or None if the module is not imported."""
    return getattr(sys.modules.get(f"executorch.exir.{module}"), name, None)


def joint_class(cls: type) -> type:
    """Return the ``__class__`` of a delegate of class ``cls``.

    ExecuTorch's passes check delegates by ``isinstance()`` with ExecuTorch's delegate class. The
    result is a subclass of both classes if ExecuTorch is loaded, else ``cls``.
    """
    peer = _loaded("lowered_backend_module", "LoweredBackendModule")
    return cls if peer is None else _joined(cls, peer)


@functools.cache
def _joined(cls: type, peer: type) -> type:
    return type(cls.__name__, (cls, peer), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def backend_base() -> Any:
    """Return the base class of backends written for ExecuTorch, or None."""
    return _loaded("backend.backend_details", "BackendDetails")


def is_exir(value: object) -> bool:
    """Return whether ``value`` is an instance of one of ExecuTorch's own classes."""
    return type(value).__module__.partition(".")[0] == "executorch"


def edge_operator(target: object) -> Any:
    """Return the torch operator of an Edge dialect operator, or None for other objects."""
    # ExecuTorch's class has no public attribute for the operator.
    operator = getattr(target, "__dict__", {}).get("_op") if is_exir(target) else None
    return operator if isinstance(operator, OpOverload) else None


def is_allocation(target: object) -> bool:
    """Return whether a function is exir's ``alloc``, which allocates memory for a kernel."""
    return target is not None and target is _loaded("memory", "alloc")


def clone_operator(like: object) -> Any:
    """Return the Edge dialect's clone operator if ``like`` is an Edge operator, else None."""
    ops = _loaded("dialects._ops", "ops")
    return ops.edge.aten.clone.default if ops is not None and is_exir(like) else None


def needs_edge(partitioner: object) -> bool:
    """Return whether a partitioner was written for ExecuTorch, and so for its Edge dialect."""
    base = _loaded("backend.partitioner", "Partitioner")
    return base is not None and isinstance(partitioner, base)


def is_exir_backend(backend: object) -> bool:
    """Return whether a backend was written for ExecuTorch, and so for its Edge dialect."""
    base = backend_base()
    return base is not None and isinstance(backend, type) and issubclass(backend, base)


def backend_own_copy(backend: Any) -> Any:
    """Return a backend's ``copy_exported_program_for_preprocess``, or None for exir's default.

    executorch 1.5.1 introduced this method; the default is a deep copy.
    """
    name = "copy_exported_program_for_preprocess"
    copies, default = getattr(backend, name, None), getattr(backend_base(), name, None)
    same = getattr(copies, "__func__", None) is getattr(default, "__func__", copies)
    return None if same else copies


def edge_dialect_is_loaded() -> bool:
    """Return whether operators of ExecuTorch's Edge dialect exist in this process."""
    modules = {"executorch.exir.dialects._ops", "executorch.exir.verification.verifier"}
    return modules <= sys.modules.keys()


def in_edge_dialect(operator: OpOverload) -> Any:
    """Return the Edge dialect counterpart of a torch operator, or None if there is none.

    View operators are mapped to their ``_copy`` variants, if the dialect has them.
    """
    namespace, _, name = schema_of(operator).name.partition("::")
    edge = getattr(_loaded("dialects._ops", "ops").edge, namespace)
    for variant in (f"{name}_copy", name) if returns_alias(operator) else (name,):
        overload = getattr(getattr(edge, variant, None), overload_name(operator), None)
        if overload is not None:
            return overload
    return None


def edge_verifier() -> Any:
    """Return the verifier class of programs in the Edge dialect."""
    checks: Any = sys.modules["executorch.exir.verification.verifier"]
    relaxed = checks.EdgeCompileConfig(_check_ir_validity=False)
    return checks.EXIREdgeDialectVerifier(relaxed, class_only=True)
