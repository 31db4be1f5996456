"""Managers that exir's own tools take for theirs, and the records that those tools make."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, ClassVar

from lowerdeck.exir_compat.errors import SettingError

_PROGRAMS = "executorch.exir.program._program"
_RECORDS = "executorch.devtools.etrecord"


class TakenForExirs:
    """What ``isinstance`` finds to be of a class of exir's too, where anyone has imported that.

    ``executorch.devtools`` (``generate_etrecord``, ``BundledProgram``) asks for the class.
    """

    _exirs_name: ClassVar[str]

    @property  # type: ignore[misc]  # Python asks for it, and never sets it
    def __class__(self) -> type[Any]:
        """The class; where exir is loaded, one that it takes for its own too."""
        own: Any = type(self)
        peer = getattr(sys.modules.get(_PROGRAMS), own._exirs_name, None)
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


def new_record() -> Any:
    """Return an empty record of ExecuTorch's devtools, for its Inspector.

    The one place of this package that imports ExecuTorch, whose class and file format it is; only
    who asks for ``generate_etrecord=True`` comes here.

    Raises:
        SettingError: The devtools are not installed.
    """
    try:
        return importlib.import_module(_RECORDS).ETRecord()
    except ImportError as error:
        raise SettingError(
            "generate_etrecord is True, and such a record is an object of executorch.devtools, "
            f"which cannot be imported: {error}; install executorch and pandas, or leave it out"
        ) from error
