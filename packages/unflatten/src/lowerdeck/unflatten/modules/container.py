"""Modules that only hold other modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial, partialmethod
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from lowerdeck.unflatten._torch_private import children_of, parameters_of
from lowerdeck.unflatten.errors import UnflattenError
from lowerdeck.unflatten.modules.readable import NO_CODE, print_readable
from lowerdeck.unflatten.modules.replacing import Holder


class Container(Holder):
    """A module that the program never calls, such as a list of layers.

    It reads like the containers of ``torch.nn``: by index, by name, and one child after the other,
    or one parameter where it has no children.
    """

    _lowerdeck_uncalled = False
    """Whether the program neither calls it or what it holds, nor reads their state, and does not
    tell whether eager's model calls them."""

    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, slice):
            of = torch.nn.ModuleList if children_of(self) else torch.nn.ParameterList
            return of(list(self)[key])
        return _at(_held(self), key)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            return key in _held(self)
        return any(child is key for child in self)

    def __delitem__(self, key: int | str | slice) -> None:
        raise _refusal("del")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Asked for last: a child may have this name.
            if name in _CHANGES:
                return partial(_refuse, name)
            raise

    def __setitem__(self, key: int | str, new: Any) -> None:
        names = list(_held(self))
        setattr(self, key if isinstance(key, str) else names[key], new)

    def __len__(self) -> int:
        return len(_held(self))

    def __iter__(self) -> Iterator[Any]:
        return iter([each for each in _held(self).values() if each is not None])

    def forward(self, *_: object, **__: object) -> Any:
        """Refuse the call: nothing is known of what this module computes.

        Raises:
            UnflattenError: Always.
        """
        raise UnflattenError(
            "A module was called that the program calls nowhere: what it computes is not known. "
            "Export a model that calls it, or put an eager module in its place."
        )

    @property
    def graph(self) -> Any:
        """An empty graph, for whoever reads the graphs of all modules."""
        return children_of(self).get("graph") or Graph()

    @property
    def graph_module(self) -> Any:
        """A module of the empty graph."""
        return children_of(self).get("graph_module") or GraphModule(self, Graph())

    @property
    def code(self) -> Any:
        """The Python source of what it computes itself: nothing."""
        return children_of(self).get("code") or NO_CODE

    @property
    def print_readable(self) -> Any:
        """What returns the code of all modules below, as that of ``InterpreterModule`` does."""
        return children_of(self).get("print_readable") or self._print_readable

    def _print_readable(
        self,
        print_output: bool = True,
        include_stride: bool = False,  # noqa: ARG002
        include_device: bool = False,  # noqa: ARG002
        colored: bool = False,  # noqa: ARG002
    ) -> str:
        return print_readable(self, "Container", print_output)

    def __bool__(self) -> bool:
        return True


_CHANGES = frozenset(
    {"append", "clear", "extend", "insert", "pop", "popitem", "setdefault", "update"}
)
"""Methods of eager's containers that change which children there are."""


def _refusal(change: str) -> UnflattenError:
    return UnflattenError(
        f"{change!r} changes which children a container has, and the program calls those that "
        "were exported: a further one would never be called, and others would be called in its "
        "place. Put a module around a child (layers[1] = Sequential(layers[1], more)) to compute "
        "more, an Identity in its place to compute nothing, or export the changed model."
    )


def _refuse(change: str, *_: object, **__: object) -> None:
    raise _refusal(change)


def restored_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return a subclass of an eager container's class that looks at what is put in it too."""
    namespace: dict[str, Any] = {
        name: partialmethod(_refuse_restored, name) for name in _CHANGES if hasattr(cls, name)
    }
    namespace.update(__module__=cls.__module__, __doc__=cls.__doc__, __reduce_ex__=_reduced)

    def new(_: type, *args: Any, **kwargs: Any) -> torch.nn.Module:
        # A slice of a list makes a list of its own class: that one is nobody's.
        return cls(*args, **kwargs)

    namespace["__new__"] = new
    if hasattr(cls, "__delitem__"):
        namespace["__delitem__"] = partialmethod(_refuse_restored, "del")
    return type(cls.__name__, (Holder, cls), namespace)


def _refuse_restored(_: torch.nn.Module, change: str, *__: object, **___: object) -> None:
    raise _refusal(change)


def _reduced(module: torch.nn.Module, _: object) -> tuple[Any, ...]:
    # The class is made when it is needed: no name leads to it.
    return _made_again, (type(module).__bases__[1],), dict(module.__dict__)


def _made_again(cls: type[torch.nn.Module]) -> torch.nn.Module:
    made: torch.nn.Module = object.__new__(restored_class(cls))
    return made


def child_at(module: torch.nn.Module, key: int | str) -> torch.nn.Module:
    """Return a child by its index or its name.

    Raises:
        IndexError: There is no such index.
        KeyError: There is no such name.
    """
    found: torch.nn.Module = _at(children_of(module), key)
    return found


def _at(held: Mapping[str, Any], key: int | str) -> Any:
    found = held[key] if isinstance(key, str) else list(held.values())[key]
    if found is None:
        raise KeyError(f"child {key!r} is None")
    return found


def _held(module: torch.nn.Module) -> dict[str, Any]:
    return children_of(module) or parameters_of(module)
