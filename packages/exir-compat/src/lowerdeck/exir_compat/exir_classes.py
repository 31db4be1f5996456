"""The base of managers, which exir's own tools take for theirs."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from torch.export import ExportedProgram

from lowerdeck.exir_compat._executorch import manager_class
from lowerdeck.exir_compat.errors import UnknownMethodError


class Manager:
    """Programs by method; ``isinstance`` finds exir's class too, where it has been imported.

    ``executorch.devtools`` (``generate_etrecord``, ``BundledProgram``) asks for the class.
    """

    _exirs_name: ClassVar[str]
    _programs: dict[str, ExportedProgram]

    @property
    def methods(self) -> set[str]:
        """The names of the methods that were exported."""
        return set(self._programs)

    def exported_program(self, method_name: str = "forward") -> ExportedProgram:
        """Return the program of a method.

        Raises:
            UnknownMethodError: There is none of that name.
        """
        if method_name not in self._programs:
            raise UnknownMethodError(
                f"there is no method {method_name!r}, but {', '.join(self._programs)}"
            )
        return self._programs[method_name]

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
