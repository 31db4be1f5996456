"""Base of managers that pass exir's ``isinstance`` checks."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from torch.export import ExportedProgram

from lowerdeck.exir_compat._executorch import manager_class
from lowerdeck.exir_compat.errors import UnknownMethodError


class Manager:
    """Programs by method; also an instance of exir's manager class if that is imported.

    ``executorch.devtools`` (``generate_etrecord``, ``BundledProgram``) checks for exir's class.
    """

    _exir_name: ClassVar[str]
    _programs: dict[str, ExportedProgram]

    @property
    def methods(self) -> set[str]:
        """Names of the exported methods."""
        return set(self._programs)

    def exported_program(self, method_name: str = "forward") -> ExportedProgram:
        """Return the program of a method.

        Raises:
            UnknownMethodError: The method does not exist.
        """
        if method_name not in self._programs:
            raise UnknownMethodError(
                f"there is no method {method_name!r}; the program has {', '.join(self._programs)}"
            )
        return self._programs[method_name]

    @property  # type: ignore[misc] # read-only in Python
    def __class__(self) -> type[Any]:
        """This class; if exir is loaded, a subclass of this class and exir's."""
        own: Any = type(self)
        peer = manager_class(own._exir_name)
        # Our class may have replaced exir's.
        return own if peer is None or issubclass(own, peer) else _joint_class(own, peer)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        # Copies and pickles use the real class, not ``__class__``.
        return _new_instance, (type(self),), dict(self.__dict__)


@functools.cache
def _joint_class(own: type, peer: type) -> type:
    return type(own.__name__, (own, peer), {"__module__": own.__module__, "__doc__": own.__doc__})


def _new_instance(cls: Any) -> Any:
    return cls.__new__(cls)
