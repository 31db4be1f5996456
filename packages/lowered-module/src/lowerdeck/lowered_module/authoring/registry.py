"""Registry of backends and partitioners by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

from lowerdeck.inspect import installed_entries
from lowerdeck.lowered_module._executorch import backend_base, is_exir_backend
from lowerdeck.lowered_module.authoring.backend import BackendDetails
from lowerdeck.lowered_module.errors import AmbiguousBackendError, BackendNotFoundError

BACKENDS = "lowerdeck.backends"
PARTITIONERS = "lowerdeck.partitioners"


_registered: dict[str, Any] = {}


def register_backend(backend: type, name: str | None = None) -> type:
    """Register ``backend`` under ``name``; usable as a class decorator.

    Args:
        backend: A class with ``preprocess``.
        name: The backend id; by default the class's ``backend_id`` or its name.

    Returns:
        The class.

    Raises:
        AmbiguousBackendError: Another class is registered under that name.
    """
    backend_id = name or backend_name(backend)
    registered = _registered.get(backend_id)
    if registered is not None and _describe(registered) != _describe(backend):
        raise AmbiguousBackendError(
            f"backend {backend_id!r} is already registered as {_describe(registered)}, found "
            f"{_describe(backend)}: choose another name, or call unregister_backend first"
        )
    _registered[backend_id] = backend
    return backend


def unregister_backend(name: str) -> None:
    """Undo ``register_backend`` of ``name``; a no-op if ``name`` is not registered."""
    _registered.pop(name, None)


def backend_name(backend: type) -> str:
    """Return the name of ``backend``: its ``backend_id``, or its class name."""
    own = getattr(backend, "backend_id", None)
    return own if isinstance(own, str) else backend.__name__


def find_backend(name: str, *, peers: bool = False) -> Any:
    """Return the backend class called ``name``.

    Registered classes come first, then imported subclasses of ``BackendDetails``, then those of
    ExecuTorch's ``BackendDetails``; with ``peers`` ExecuTorch's precede ours. Entry points of the
    group ``lowerdeck.backends`` come last.

    Args:
        peers: Whether the name is from a DelegationSpec of ExecuTorch.

    Raises:
        BackendNotFoundError: No backend has this name.
        AmbiguousBackendError: Several different classes have this name. If all are written for
            ExecuTorch, the newest is used instead, with a warning.
    """
    if name in _registered:
        return _registered[name]
    bases = [BackendDetails, backend_base()]
    backends: list[Any] = []
    for base in reversed(bases) if peers else bases:
        backends = backends or _newest(c for c in _subclasses(base) if backend_name(c) == name)
    if not backends:
        backends = _newest(entry.load() for entry in installed_entries(BACKENDS, name))
    if len(backends) > 1 and all(map(is_exir_backend, backends)):
        # exir has no check: with several methods the newest class compiles, with one the oldest.
        warnings.warn(
            f"found several classes of backend {name}, {' and '.join(map(_describe, backends))}: "
            "the newest is used, as when exir lowers several methods",
            stacklevel=2,
        )
        backends = backends[-1:]
    if len(backends) > 1:
        listing = " and ".join(_describe(backend) for backend in backends)
        raise AmbiguousBackendError(
            f"backend {name!r} is ambiguous, found {listing}: pass one of them to "
            "register_backend, or rename one (class attribute backend_id)"
        )
    if not backends:
        raise BackendNotFoundError(
            f"Backend {name} was not found. Known: {', '.join(backend_names()) or 'none'}. "
            f"Import its class, register it with register_backend, or install a distribution "
            f"with an entry point of that name in the group {BACKENDS!r}"
        )
    return backends[0]


def backend_names() -> list[str]:
    """Return the sorted names of all backends that can be found, without loading any."""
    names = set(_registered)
    for base in (BackendDetails, backend_base()):
        names.update(backend_name(cls) for cls in _subclasses(base))
    names.update(entry.name for entry in installed_entries(BACKENDS))
    return sorted(names)


def find_partitioner(name: str) -> Any:
    """Return a new instance of the installed partitioner called ``name``.

    Args:
        name: Name of an entry point in the group ``lowerdeck.partitioners``, by convention the
            backend id; ``xnnpack`` is short for ``XnnpackBackend``.

    Raises:
        BackendNotFoundError: No installed distribution registers it.
        AmbiguousBackendError: Several distributions register different ones.
    """
    return installed_partitioner(name).load()()


def installed_partitioner(name: str) -> EntryPoint:
    """Return the entry point of the installed partitioner called ``name``.

    Raises:
        BackendNotFoundError: No installed distribution registers it.
        AmbiguousBackendError: Several distributions register different ones.
    """
    return only_entry(PARTITIONERS, name, f"backend {name!r} was not found")


def only_entry(group: str, name: str, missing: str) -> EntryPoint:
    """Return the only installed entry point called ``name`` in ``group``.

    Args:
        missing: The beginning of the error message if there is none.

    Raises:
        BackendNotFoundError: No installed distribution registers it.
        AmbiguousBackendError: Several distributions register different ones.
    """
    entries = installed_entries(group, name) or [
        entry for entry in installed_entries(group) if _short(entry.name) == _short(name)
    ]
    chosen = {entry.value: entry for entry in entries}
    if not chosen:
        names = sorted({entry.name for entry in installed_entries(group)})
        raise BackendNotFoundError(
            f"{missing}. Installed: {', '.join(names) or 'none'}. Install a distribution with an "
            f"entry point of that name in the group {group!r}"
        )
    if len(chosen) > 1:
        raise AmbiguousBackendError(
            f"{name!r} of {group!r} is ambiguous, found {' and '.join(chosen)}: uninstall one"
        )
    return next(iter(chosen.values()))


def _short(name: str) -> str:
    """Return a backend's short name, such as ``xnnpack`` for ``XnnpackBackend``."""
    return name.lower().removesuffix("backend")


def _newest(candidates: Iterable[Any]) -> list[Any]:
    """Return the newest class of each name: notebook cells redefine classes."""
    return list({_describe(candidate): candidate for candidate in candidates}.values())


def _subclasses(base: Any) -> Iterator[Any]:
    waiting: list[Any] = [] if base is None else list(base.__subclasses__())
    while waiting:
        cls = waiting.pop(0)
        waiting.extend(cls.__subclasses__())
        if not getattr(cls, "__abstractmethods__", None):
            yield cls


def _describe(backend: Any) -> str:
    return f"{backend.__module__}.{backend.__qualname__}"
