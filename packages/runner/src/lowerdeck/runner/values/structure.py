"""Parse serialized pytree specs of inputs and outputs without torch's reader.

torch's ``treespec_loads`` imports every module that the text names, which is unsafe for untrusted
files. This parser supports Python containers and named tuples that are registered in the process,
and imports nothing.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_TEXT = 1 << 20
"""Limit of the text, in characters: some 18,000 leaves of 56 each."""

MAX_DEPTH = 32
"""Limit of nesting."""

MAX_PATH = 512
"""Limit of the characters of all keys on the path to a leaf, which messages show."""

Tree = Any
"""Tuples, lists, dicts and named tuples with 0 for each leaf."""


class UnknownStructureError(ValueError):
    """The text is malformed, exceeds a limit or has an unsupported container."""


def parse_structure(text: str, named_tuples: Callable[[str], type | None]) -> Tree:
    """Return a tree with the structure that ``treespec_dumps`` serialized.

    Args:
        text: Untrusted text.
        named_tuples: Returns the registered named tuple class of a name, or None.

    Returns:
        The containers, with 0 for each leaf.

    Raises:
        UnknownStructureError: The text is malformed, too long or too deep, or has a container
            other than tuple, list, dict, ``OrderedDict`` and registered named tuples.
    """
    if len(text) > MAX_TEXT:
        raise UnknownStructureError(f"{len(text)} characters; expected at most {MAX_TEXT}")
    match _json(text):
        case [1, node]:
            return _tree(node, named_tuples, MAX_DEPTH, MAX_PATH)
        case _:
            raise UnknownStructureError("expected [1, structure]")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnknownStructureError(f"the text is not JSON: {error}") from error


def _tree(node: Any, named_tuples: Callable[[str], type | None], depth: int, length: int) -> Tree:
    match node:
        case {"type": None, "context": None, "children_spec": []}:
            return 0
        case {"type": str(kind), "context": str(context), "children_spec": list(children)}:
            pass
        case _:
            raise UnknownStructureError(
                "expected a node with a type, a context and a list of children"
            )
    if depth == 0:
        raise UnknownStructureError(f"nested deeper than {MAX_DEPTH}")
    keys = _keys(kind, context, len(children))
    items = [
        _tree(child, named_tuples, depth - 1, _without(length, key))
        for key, child in zip(keys, children, strict=True)
    ]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](items)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind](zip(keys, items, strict=True))
    return _named_tuple(named_tuples(context), items)


_SEQUENCES: Mapping[str, Callable[[Any], Any]] = {"builtins.tuple": tuple, "builtins.list": list}
_MAPPINGS: Mapping[str, Callable[[Any], Any]] = {
    "builtins.dict": dict,
    "collections.OrderedDict": OrderedDict,
}
_NAMED_TUPLE = "collections.namedtuple"


def _keys(kind: str, context: str, count: int) -> Sequence[str | int]:
    """Return the keys of ``count`` children: dict keys or indices."""
    if kind == _NAMED_TUPLE or (kind in _SEQUENCES and context == "null"):
        return range(count)
    if kind not in _MAPPINGS:
        raise UnknownStructureError(f"the container {kind[:80]!r} is unknown or malformed")
    keys = _json(context)
    if (
        not isinstance(keys, list)
        or len(keys) != count
        or not all(isinstance(key, (str, int)) for key in keys)
        or len(set(keys)) != count
    ):
        raise UnknownStructureError("expected distinct strings or ints as dict keys")
    return keys


def _without(length: int, key: str | int) -> int:
    """Return the remaining characters for keys below ``key``."""
    remaining = length - len(str(key))
    if remaining < 0:
        raise UnknownStructureError(f"the keys above a leaf have more than {MAX_PATH} characters")
    return remaining


def _named_tuple(cls: Any, items: list[Any]) -> Tree:
    if cls is None or not issubclass(cls, tuple) or len(getattr(cls, "_fields", ())) != len(items):
        raise UnknownStructureError("a named tuple is not registered with torch, or differs")
    return cls._make(items)
