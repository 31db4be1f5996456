"""Weights that go to a `.ptd` file beside the program."""

from __future__ import annotations

from lowerdeck.emitter.backend.boxing import SCALAR_TYPES
from lowerdeck.emitter.ir.values import TensorValue
from lowerdeck.serializer import NamedDataStore, TensorLayout

_ALIGNMENT = 16


class ExternalWeights:
    """Puts weights into a store under the names that the program looks them up by.

    Args:
        store: Takes the bytes, without copying them.
        tag: Stem of the `.ptd` file.
    """

    def __init__(self, store: NamedDataStore, tag: str) -> None:
        self._store = store
        self._tag = tag

    def add(self, value: TensorValue, root: TensorValue, offset: int, data: memoryview) -> str:
        """Store the bytes of a weight; return the key under which the runtime finds it.

        Args:
            value: The weight as the program reads it.
            root: The parameter or buffer whose memory it lies in.
            offset: Offset in bytes into that memory.
            data: Its bytes.
        """
        layout = TensorLayout(SCALAR_TYPES[value.dtype], list(value.sizes), list(value.dim_order))
        key = root.key
        if value is not root or not value.contiguous:
            # The runtime compares shape and layout with the file, so each form has its own key.
            form = "x".join(map(str, value.sizes))
            order = "".join(map(str, value.dim_order))
            key = f"{key}:{offset}:{form}:{order}:{value.dtype}"
        self._store.add_named_data(key, data, _ALIGNMENT, self._tag, layout)
        return key
