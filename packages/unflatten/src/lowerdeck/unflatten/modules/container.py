"""Modules that only have children, and are not called by the program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from lowerdeck.unflatten._torch_private import children_of, parameters_of
from lowerdeck.unflatten.attributes import NAME
from lowerdeck.unflatten.errors import UnflattenError
from lowerdeck.unflatten.swaps import Refusing

_CHANGES = frozenset(
    {"append", "clear", "extend", "insert", "pop", "popitem", "setdefault", "update"}
)
"""Methods of eager's containers that add or remove children."""


class Container(Refusing):
    """A module that the program never calls, such as a list of layers.

    It is read like the containers of ``torch.nn``: by index, by name and by iteration over its
    children, or over its parameters if it has no children.
    """

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.__dict__[NAME] = name

    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, slice):
            of = torch.nn.ModuleList if children_of(self) else torch.nn.ParameterList
            return of(list(self)[key])
        return _at(_members(self), key)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            return key in _members(self)
        return any(child is key for child in self)

    def __delitem__(self, key: int | str | slice) -> None:
        raise _refusal("del")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Last, because a child may have this name.
            if name in _CHANGES:
                return partial(_refuse, name)
            raise

    def __setitem__(self, key: int | str, new: Any) -> None:
        names = list(_members(self))
        setattr(self, key if isinstance(key, str) else names[key], new)

    def __len__(self) -> int:
        return len(_members(self))

    def __iter__(self) -> Iterator[Any]:
        return iter([member for member in _members(self).values() if member is not None])

    def __bool__(self) -> bool:
        return True

    def forward(self, *_: object, **__: object) -> Any:
        """Refuse the call: the program does not record what this module computes.

        Raises:
            UnflattenError: Always.
        """
        raise UnflattenError(
            "a module was called that the program never calls, so its code is unknown. Export a "
            "model that calls it, or put an eager module in its place."
        )


def _refusal(change: str) -> UnflattenError:
    return UnflattenError(
        f"{change!r} adds or removes children, and the program calls the exported ones. Put "
        "a module around a child (layers[1] = Sequential(layers[1], more)) to compute more, an "
        "Identity in its place to compute nothing, or export the changed model."
    )


def _refuse(change: str, *_: object, **__: object) -> None:
    raise _refusal(change)


def restored_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return a subclass of an eager container's class that refuses to add or remove children."""
    namespace: dict[str, Any] = {
        name: partial(_refuse, name) for name in _CHANGES if hasattr(cls, name)
    }
    if hasattr(cls, "__delitem__"):
        namespace["__delitem__"] = lambda self, key: _refuse("del", self, key)
    namespace.update(__module__=cls.__module__, __doc__=cls.__doc__, __reduce_ex__=_reduce)

    def new(_: type, *args: Any, **kwargs: Any) -> torch.nn.Module:
        # A slice of a list creates a list of the same class; it must be a plain one.
        return cls(*args, **kwargs)

    namespace["__new__"] = new
    return type(cls.__name__, (Refusing, cls), namespace)


def _reduce(module: torch.nn.Module, _: object) -> tuple[Any, ...]:
    # The class is created when it is needed, so no name leads to it.
    return _restore, (type(module).__bases__[1],), dict(module.__dict__)


def _restore(cls: type[torch.nn.Module]) -> torch.nn.Module:
    module: torch.nn.Module = object.__new__(restored_class(cls))
    return module


def child_at(module: torch.nn.Module, key: int | str) -> torch.nn.Module:
    """Return a child by its index or its name.

    Raises:
        IndexError: The index is out of range.
        KeyError: No child has this name.
    """
    child: torch.nn.Module = _at(children_of(module), key)
    return child


def _at(members: Mapping[str, Any], key: int | str) -> Any:
    member = members[key] if isinstance(key, str) else list(members.values())[key]
    if member is None:
        raise KeyError(f"child {key!r} is None")
    return member


def _members(module: torch.nn.Module) -> dict[str, Any]:
    return children_of(module) or parameters_of(module)
