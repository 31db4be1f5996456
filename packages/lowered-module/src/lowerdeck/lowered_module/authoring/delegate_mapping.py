"""Map debug identifiers that a delegate logs at run time to nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch.fx import Node

from lowerdeck.lowered_module.errors import DelegateMappingError

Nodes = Node | Iterable[Node]
Handles = int | Iterable[int | None]


class DelegateMappingBuilder:
    """Builder of the map from debug identifiers of a delegate to debug handles.

    A rejected entry leaves the builder unchanged and uses no identifier.

    Args:
        generated_identifiers: Whether the builder numbers the entries 0, 1, 2, ...; otherwise the
            caller passes identifiers.

    Example:
        >>> builder = DelegateMappingBuilder(generated_identifiers=True)
        >>> builder.insert_delegate_mapping_entry(handles=[7, 3])
        0
        >>> builder.get_delegate_mapping()
        {0: (3, 7)}
    """

    def __init__(self, generated_identifiers: bool = False) -> None:
        self._generated = generated_identifiers
        self._entries: dict[int | str, tuple[int, ...]] = {}

    def get_delegate_mapping(self) -> dict[int, tuple[int, ...]] | dict[str, tuple[int, ...]]:
        """Return a copy of the map: each identifier with its handles in ascending order."""
        return cast("dict[int, tuple[int, ...]]", dict(self._entries))

    def insert_delegate_mapping_entry(
        self,
        nodes: Nodes | None = None,
        handles: Handles | None = None,
        identifier: int | str | None = None,
    ) -> int | str:
        """Add one entry and return its identifier.

        Args:
            nodes: A node or an iterable of nodes, with ``meta["debug_handle"]``. Nodes without a
                handle are skipped.
            handles: A handle or an iterable of handles; None is skipped. Exactly one of ``nodes``
                and ``handles`` is required.
            identifier: The identifier of the entry, for builders that do not generate them.

        Returns:
            The identifier, passed or generated.

        Raises:
            DelegateMappingError: The identifier is missing, not allowed, of another type or a
                duplicate; not exactly one of ``nodes`` and ``handles`` is passed; or there is no
                handle.
        """
        collected = _handles_of(nodes, handles)
        key = self._identifier(identifier)
        self._entries[key] = collected
        return key

    def _identifier(self, identifier: int | str | None) -> int | str:
        if self._generated and identifier is None:
            return len(self._entries)
        kind = type(next(iter(self._entries), identifier))
        if self._generated:
            problem = "the builder generates identifiers: omit it"
        elif not isinstance(identifier, int | str) or type(identifier) is not kind or kind is bool:
            problem = "expected an int or a str, the same type for all entries"
        elif identifier in self._entries:
            problem = f"it already has the handles {self._entries[identifier]}: use another one"
        else:
            return identifier
        raise DelegateMappingError(f"found identifier {identifier!r}, but {problem}")


def _handles_of(nodes: Nodes | None, handles: Handles | None) -> tuple[int, ...]:
    if (nodes is None) == (handles is None):
        raise DelegateMappingError(
            "found both or neither of nodes and handles, expected one of them"
        )
    entries: Any = nodes if handles is None else handles
    candidates: list[Any] = [entries] if isinstance(entries, (Node, int)) else list(entries)
    numbers: set[Any] = {
        candidate.meta.get("debug_handle") if isinstance(candidate, Node) else candidate
        for candidate in candidates
    } - {None}
    if not numbers or not all(type(handle) is int for handle in numbers):
        raise DelegateMappingError(
            f"found [{', '.join(map(str, candidates))}], expected nodes with debug handles, or "
            'handles: lower with to_backend, which sets node.meta["debug_handle"]'
        )
    return tuple(sorted(numbers))
