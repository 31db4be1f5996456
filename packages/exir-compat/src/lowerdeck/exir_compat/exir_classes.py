"""Managers that exir's own tools take for theirs."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from lowerdeck.exir_compat._executorch import manager_class


class TakenForExirs:
    """What ``isinstance`` finds to be of a class of exir's too, where anyone has imported that.

    ``executorch.devtools`` (``generate_etrecord``, ``BundledProgram``) asks for the class.
    """

    _exirs_name: ClassVar[str]

    @property  # type: ignore[misc]  # Python asks for it, and never sets it
    def __class__(self) -> type[Any]:
        """The class; where exir is loaded, one that it takes for its own too."""
        own: Any = type(self)
        peer = manager_class(own._exirs_name)
        # Where our name has been put in the place of exir's, ours is all there is.
        return own if peer is None or issubclass(own, peer) else _joined(own, peer)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        # Copies would be made of the class that ``__class__`` says, which has no other's methods.
        return _unfilled, (type(self),), dict(self.__dict__)


@functools.cache
def _joined(own: type, peer: type) -> type:
    return type(own.__name__, (own, peer), {"__module__": own.__module__, "__doc__": own.__doc__})


def _unfilled(cls: Any) -> Any:
    return cls.__new__(cls)
