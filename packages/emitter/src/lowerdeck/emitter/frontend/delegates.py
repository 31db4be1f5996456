"""Delegate protocol, and a pool of delegate bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from lowerdeck.emitter.errors import InvalidDelegateError
from lowerdeck.serializer import (
    BackendDelegate,
    BackendDelegateDataReference,
    BackendDelegateInlineData,
    CompileSpec,
    DataLocation,
    NamedDataStore,
    NamedDataStoreOutput,
)


@runtime_checkable
class LoweredModule(Protocol):
    """Protocol of a subgraph that a backend has compiled.

    Attributes:
        backend_id: Name under which the backend is registered in the runtime.
        processed_bytes: The payload that the runtime passes to the backend.
        compile_specs: Settings that the runtime passes to the backend.
    """

    backend_id: str
    processed_bytes: bytes
    compile_specs: Sequence[CompileSpec]


class DelegatePool:
    """Collects the bytes of the delegates of a program.

    Args:
        weights_file: Stem of the `.ptd` file for the delegates' named data, unless a backend chose
            another file; None for the `.pte`.
    """

    def __init__(self, weights_file: str | None = None) -> None:
        self._weights_file = weights_file
        self.data: list[BackendDelegateInlineData] = []
        self._by_content: dict[bytes, int] = {}
        self._named_data = NamedDataStore()

    def delegate(self, module: LoweredModule) -> BackendDelegate:
        """Return the table entry for a lowered module.

        Raises:
            InvalidDelegateError: If its attributes have the wrong types.
        """
        backend, content = module.backend_id, module.processed_bytes
        if not isinstance(backend, str) or not isinstance(content, (bytes, bytearray, memoryview)):
            raise InvalidDelegateError(
                f"a lowered module has backend_id {backend!r} and processed_bytes of type "
                f"{type(content).__name__}; expected a str and bytes"
            )
        key = bytes(content)
        if key not in self._by_content:
            self._by_content[key] = len(self.data)
            self.data.append(BackendDelegateInlineData(content))
        store = getattr(module, "named_data_store_output", None)
        if store is not None:
            self._named_data.merge_named_data_store(store)
        return BackendDelegate(
            id=backend,
            processed=BackendDelegateDataReference(DataLocation.INLINE, self._by_content[key]),
            compile_specs=[CompileSpec(spec.key, spec.value) for spec in module.compile_specs],
        )

    def named_data(self) -> NamedDataStoreOutput:
        """Return the blobs that the backends look up by key at run time."""
        output = self._named_data.get_named_data_store_output()
        if self._weights_file is not None and output.pte_data:
            output.external_data.setdefault(self._weights_file, {}).update(output.pte_data)
            output.pte_data = {}
        return output
