"""Sizes as Python text, computed of what code has when a call returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.fx import Node

from lowerdeck.unflatten.results.result_check import Sizes, sizes_of
from lowerdeck.unflatten.sizes.solving import SizeSolver, text_of


class SizeTexts:
    """Writes the sizes that were recorded in what is there when a call returns.

    Args:
        nodes: All nodes of the code, in their order.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._first: dict[Any, list[tuple[int, str]]] = {}
        self._solvers: dict[tuple[Any, ...], SizeSolver] = {}
        read = [(place, node) for place, node in enumerate(nodes) if node.users]
        numbers = [each for each in read if isinstance(sizes_of(each[1]), sympy.Basic)]
        arguments = [each for each in enumerate(nodes) if each[1].op == "placeholder"]
        for some in (numbers, arguments, read):
            found: dict[Any, tuple[int, str]] = {}
            for place, node in some:
                for size, text in _sizes_in(node):
                    found.setdefault(size, (place, text))
            for size, where in found.items():
                self._first.setdefault(size, []).append(where)

    def of(self, size: Any, place: int) -> str | None:
        """Return the text of a size, ``{node}`` for a node; None if nothing tells the size.

        Args:
            size: Its expression.
            place: The place of the call among the nodes.
        """
        known = {
            each: next(text for at, text in texts if at < place)
            for each, texts in self._first.items()
            if any(at < place for at, _ in texts)
        }
        if size in known:
            return known[size]
        key = tuple(known)
        if key not in self._solvers:
            self._solvers[key] = SizeSolver(key, converts=True)
        solver = self._solvers[key]
        found = solver.find(size)
        return None if found is None else text_of(found, solver, list(known.values()))


def _sizes_in(node: Node) -> Iterator[tuple[Any, str]]:
    """Yield the sizes that vary which a number is, or a tensor has, with their texts."""
    sizes = sizes_of(node)
    if isinstance(sizes, sympy.Basic):
        yield sizes, f"{{{node.name}}}"
    for dim, size in enumerate(sizes.shape if isinstance(sizes, Sizes) else ()):
        if isinstance(size, sympy.Basic):
            yield size, f"{{{node.name}}}.shape[{dim}]"
