"""Interoperation with ExecuTorch's classes, in any order of imports.

Nothing here imports ExecuTorch. Code that has an object of its classes, or asks about one, has
imported the module that defines the class, so that looking whether it is loaded is enough; and it
is looked each time that it is asked, never once and for all.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from lowerdeck.torch_base import OpOverload, overload_name, returns_alias, schema_of


def _loaded(module: str, name: str) -> Any:
    """Return a part of a module of exir, None if it is not imported."""
    return getattr(sys.modules.get(f"executorch.exir.{module}"), name, None)


def as_peer(cls: type) -> type:
    """Return the class that a delegate of ``cls`` says it is of.

    ExecuTorch's passes ask ``isinstance()`` for their own class of delegates. The class returned
    is a subclass of both where that is loaded, else ``cls``.

    Args:
        cls: This package's class of delegates.
    """
    peer = _loaded("lowered_backend_module", "LoweredBackendModule")
    return cls if peer is None else _joined(cls, peer)


@functools.cache
def _joined(cls: type, peer: type) -> type:
    return type(cls.__name__, (cls, peer), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def backend_base() -> Any:
    """Return the base of the backends that were written for ExecuTorch, or None."""
    return _loaded("backend.backend_details", "BackendDetails")


def is_peers(value: object) -> bool:
    """Return whether ``value`` is an object of one of ExecuTorch's own classes."""
    return type(value).__module__.partition(".")[0] == "executorch"


def edge_operator(target: object) -> Any:
    """Return torch's operator behind one of ExecuTorch's Edge dialect, None for anything else."""
    # The name under which ExecuTorch's class keeps it; no public one exists.
    operator = getattr(target, "__dict__", {}).get("_op") if is_peers(target) else None
    return operator if isinstance(operator, OpOverload) else None


def clone_operator(like: object) -> Any:
    """Return the clone operator of the dialect that the operator ``like`` is of, or None."""
    ops = _loaded("dialects._ops", "ops")
    return ops.edge.aten.clone.default if ops is not None and is_peers(like) else None


def wants_edge(partitioner: object) -> bool:
    """Return whether a partitioner was written for ExecuTorch, and so for its Edge dialect."""
    base = _loaded("backend.partitioner", "Partitioner")
    return base is not None and isinstance(partitioner, base)


def is_peers_backend(backend: object) -> bool:
    """Return whether a backend is of ExecuTorch's kind: also ours, where it is in its list.

    Args:
        backend: The class of a backend.
    """
    base = backend_base()
    return base is not None and isinstance(backend, type) and issubclass(backend, base)


def backend_own_copy(backend: Any) -> Any:
    """Return a backend's ``copy_exported_program_for_preprocess``, None for exir's default of it.

    executorch 1.5.1 introduced it; the default makes a deep copy.
    """
    name = "copy_exported_program_for_preprocess"
    copies, default = getattr(backend, name, None), getattr(backend_base(), name, None)
    same = getattr(copies, "__func__", None) is getattr(default, "__func__", copies)
    return None if same else copies


def wants_edge_backend(backend: object) -> bool:
    """Return whether a backend was written for ExecuTorch, and so for its Edge dialect.

    Args:
        backend: The class of a backend.
    """
    # One of ours in ExecuTorch's list has this package as its module.
    ours = getattr(backend, "__module__", "").partition(".")[0] == "lowerdeck"
    return is_peers_backend(backend) and not ours


def edge_dialect_is_loaded() -> bool:
    """Return whether anyone can compare operators with those of ExecuTorch's Edge dialect.

    Such code has imported the module that makes them.
    """
    modules = {"executorch.exir.dialects._ops", "executorch.exir.verification.verifier"}
    return modules <= sys.modules.keys()


def in_edge_dialect(operator: OpOverload) -> Any:
    """Return the Edge dialect's operator for one of torch's, None where it has none.

    What returns views is a copy there.

    Args:
        operator: An operator of torch.
    """
    namespace, _, name = schema_of(operator).name.partition("::")
    edge = getattr(_loaded("dialects._ops", "ops").edge, namespace)
    for variant in (f"{name}_copy", name) if returns_alias(operator) else (name,):
        found = getattr(getattr(edge, variant, None), overload_name(operator), None)
        if found is not None:
            return found
    return None


def edge_verifier() -> Any:
    """Return the class that says of programs that they are of the Edge dialect."""
    checks: Any = sys.modules["executorch.exir.verification.verifier"]
    relaxed = checks.EdgeCompileConfig(_check_ir_validity=False)
    return checks.EXIREdgeDialectVerifier(relaxed, class_only=True)
