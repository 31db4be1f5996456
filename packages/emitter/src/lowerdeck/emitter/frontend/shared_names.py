"""The ``shared_state`` setting: names of one state with several copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TypeAlias

from lowerdeck.emitter.errors import EmitterError

SharedState: TypeAlias = bool | Iterable[str | tuple[str, ...]]
"""Names that are one state in all methods; a tuple has the names of one state; True for all names.
"""


@dataclass(frozen=True, slots=True)
class SharedNames:
    """The validated names of shared states.

    Attributes:
        every: Whether equal names are one state in all methods.
        sets: The names of each state.
    """

    every: bool = False
    sets: tuple[frozenset[str], ...] = ()

    @classmethod
    def of(cls, setting: SharedState) -> SharedNames:
        """Return the validated setting.

        Args:
            setting: The argument ``shared_state`` of ``emit``.

        Raises:
            EmitterError: If it has another form.
        """
        if isinstance(setting, bool):
            return cls(every=setting)
        if isinstance(setting, str):
            raise _wrong(setting, f"write [{setting!r}]")
        unordered: object = setting
        if isinstance(setting, (bytes, Mapping)) or not isinstance(unordered, Iterable):
            raise _wrong(setting, 'write ["cache"] or [("cache", "other.cache")]')
        sets: list[frozenset[str]] = []
        for entry in setting:
            names = (entry,) if isinstance(entry, str) else entry
            if not isinstance(names, (tuple, Set)) or not names:
                raise _wrong(entry, "an entry is a name, or a tuple of the names of one state")
            if not all(isinstance(name, str) for name in names):
                raise _wrong(entry, "an entry is a name, or a tuple of the names of one state")
            sets.append(frozenset(names))
        return cls(sets=_united(sets))


def _united(sets: Iterable[frozenset[str]]) -> tuple[frozenset[str], ...]:
    """Merge the sets that have a name in common."""
    apart: list[frozenset[str]] = []
    for names in sets:
        joined = names
        for other in [other for other in apart if not other.isdisjoint(names)]:
            apart.remove(other)
            joined |= other
        apart.append(joined)
    return tuple(apart)


def _wrong(actual: object, cure: str) -> EmitterError:
    kind = type(actual).__name__
    return EmitterError(
        f"shared_state: found {actual!r} ({kind}), expected True or a list of names: {cure}"
    )
