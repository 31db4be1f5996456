"""Store weights in `.ptd` files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.emitter.backend.boxing import SCALAR_TYPES
from lowerdeck.emitter.errors import EmitterError
from lowerdeck.emitter.ir.values import TensorValue
from lowerdeck.serializer import NamedDataStore, TensorLayout

_ALIGNMENT = 16


class ExternalWeights:
    """Adds weights to a named data store, under the keys that the program refers to.

    Args:
        store: Receives the bytes, without a copy.
        stem_of: Returns the stem of the `.ptd` file for a parameter or buffer, None for the
            `.pte`.
    """

    def __init__(self, store: NamedDataStore, stem_of: Callable[[str], str | None]) -> None:
        self._store = store
        self._stem_of = stem_of

    def add(
        self, value: TensorValue, root: TensorValue, offset: int, data: memoryview
    ) -> str | None:
        """Store the bytes of a weight; return the key that the runtime looks up.

        Args:
            value: The weight as the program reads it.
            root: The parameter or buffer that owns its memory.
            offset: Offset in bytes into that memory.

        Returns:
            The key, None for a weight that stays in the program.
        """
        stem = self._stem_of(root.key)
        if stem is None:
            return None
        layout = TensorLayout(SCALAR_TYPES[value.dtype], list(value.sizes), list(value.dim_order))
        key = root.key
        if value is not root or not value.contiguous:
            # The runtime compares shape and layout with the file, so each combination has its own
            # key.
            form = "x".join(map(str, value.sizes))
            order = "".join(map(str, value.dim_order))
            key = f"{key}:{offset}:{form}:{order}:{value.dtype}"
        self._store.add_named_data(key, data, _ALIGNMENT, stem, layout)
        return key


class ChosenFiles:
    """Calls the user's function to assign parameters and buffers to files.

    Args:
        choose: Returns the stem of a `.ptd` file, or None, for the placeholder of a parameter or
            buffer.
    """

    def __init__(self, choose: Callable[[Node], str | None]) -> None:
        self._choose = choose
        self._chosen: dict[str, str | None] = {}

    def of(self, method: str, program: ExportedProgram) -> Callable[[str], str | None]:
        """Return a cached function from the weight names of one method to file stems."""
        nodes = _placeholders(program)
        stems: dict[str, str | None] = {}

        def stem_of(key: str) -> str | None:
            # Constants that the emitter computed have no placeholder: they stay in the program.
            if key not in stems and key in nodes:
                stems[key] = self._checked_stem(key, nodes[key], method)
            return stems.get(key)

        return stem_of

    def _checked_stem(self, key: str, node: Node, method: str) -> str | None:
        stem: Any = self._choose(node)
        if stem is not None and not is_stem(stem):
            raise EmitterError(
                f"config: external_constants returned {stem!r} for {key!r}, expected the stem of "
                "a file's name, such as 'weights', or None for what stays in the program"
            )
        chosen = self._chosen.setdefault(key, stem)
        if chosen != stem:
            raise EmitterError(
                f"config: external_constants returned {stem!r} for {key!r} of method {method!r}, "
                f"and {chosen!r} for the same weight in another method: choose by a property "
                "that both placeholders share, such as node.target"
            )
        return chosen


def is_stem(value: object) -> bool:
    """Return whether a value is a valid stem of a file name."""
    return (
        isinstance(value, str) and bool(value) and "\0" not in value and Path(value).name == value
    )


def _placeholders(program: ExportedProgram) -> Mapping[str, Node]:
    """Return the placeholder of each parameter and buffer, by its name in the model."""
    signature = program.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    return {
        targets[node.name]: node
        for node in program.graph.find_nodes(op="placeholder")
        if node.name in targets
    }
