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
        generated_identifiers: Number the entries 0, 1, 2, ... instead of taking identifiers.

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
        kind = type(next(iter(self._entries), identifier))
        if self._generated and identifier is None:
            return len(self._entries)
        if self._generated:
            problem = (
                f"identifier {identifier!r} was given to a builder that generates its own: "
                "leave it out, or make the builder with generated_identifiers=False"
            )
        elif isinstance(identifier, bool) or not isinstance(identifier, int | str):
            problem = (
                f"an int or str identifier is needed, found {identifier!r}: give one, or make the "
                "builder with generated_identifiers=True"
            )
        elif identifier in self._entries:
            problem = (
                f"identifier {identifier!r} has handles {self._entries[identifier]} "
                "already: give every entry another identifier"
            )
        elif not isinstance(identifier, kind):
            problem = (
                f"identifier {identifier!r} is no {kind.__name__} like those before it: a map has "
                "either int or str identifiers"
            )
        else:
            return identifier
        raise DelegateMappingError(problem)


def _handles_of(nodes: Nodes | None, handles: Handles | None) -> tuple[int, ...]:
    if (nodes is None) == (handles is None):
        raise DelegateMappingError(
            "exactly one of nodes and handles is needed, found "
            + ("neither" if nodes is None else "both")
        )
    given: Any = nodes if handles is None else handles
    candidates: list[Any] = [given] if isinstance(given, (Node, int)) else list(given)
    if handles is None:
        for node in candidates:
            if not isinstance(node, Node):
                raise DelegateMappingError(
                    f"torch.fx nodes are needed, found {node!r} of type {type(node).__name__}"
                )
    found = candidates
    if handles is None:
        found = [node.meta.get("debug_handle") for node in candidates]
    collected = {handle for handle in found if handle is not None}
    for handle in collected:
        if isinstance(handle, bool) or not isinstance(handle, int):
            raise DelegateMappingError(
                f"debug handles are ints, found {handle!r} of type {type(handle).__name__}"
            )
    if not collected:
        raise DelegateMappingError(
            f"no debug handle among [{', '.join(map(str, candidates))}]: lower through to_backend, which gives every "
            'node one, or set node.meta["debug_handle"]'
        )
    return tuple(sorted(collected))
