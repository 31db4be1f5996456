"""Backends: the interface to implement, and the result of compilation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch.export import ExportedProgram

from lowerdeck.lowered_module.errors import PreprocessError
from lowerdeck.serializer import NamedDataStoreOutput


@dataclass(frozen=True, slots=True)
class CompileSpec:
    """One setting, written into the file with the delegate's blob.

    Attributes:
        key: Name of the setting, such as ``"max_value"``.
        value: The setting as bytes, in a form defined by the backend.
    """

    key: str
    value: bytes


DebugHandleMap = Mapping[int, tuple[int, ...]] | Mapping[str, tuple[int, ...]]


@dataclass(slots=True, init=False)
class PreprocessResult:
    """Result of compiling one partition.

    Attributes:
        processed_bytes: The blob for the backend's runtime; it may be empty.
        debug_handle_map: For each debug identifier that the runtime logs, the debug handles of its
            nodes (see ``DelegateMappingBuilder``); None if the runtime logs no identifiers.
        data_store_output: Named data that the runtime looks up by key, such as weights that
            several delegates share (from ``NamedDataStore.get_named_data_store_output()``).
        delegate_info_meta: Any data for ahead-of-time tools, not written to the file; it is
            ``meta["_delegate_info_meta"]`` of the ``LoweredBackendModule``. ExecuTorch's name
            ``_delegate_info_meta`` is accepted and readable as well.
    """

    processed_bytes: bytes = b""
    debug_handle_map: DebugHandleMap | None = None
    data_store_output: NamedDataStoreOutput | None = None
    delegate_info_meta: Any = None

    def __init__(
        self,
        processed_bytes: bytes = b"",
        debug_handle_map: DebugHandleMap | None = None,
        data_store_output: NamedDataStoreOutput | None = None,
        delegate_info_meta: Any = None,
        *,
        _delegate_info_meta: Any = None,
    ) -> None:
        self.processed_bytes = processed_bytes
        self.debug_handle_map = debug_handle_map
        self.data_store_output = data_store_output
        has_meta = delegate_info_meta is not None
        self.delegate_info_meta = delegate_info_meta if has_meta else _delegate_info_meta

    @property
    def _delegate_info_meta(self) -> Any:
        # ExecuTorch's `to_backend` reads the result of any backend under this name.
        return self.delegate_info_meta


def with_plain_bytes(result: Any) -> PreprocessResult:
    """Return ``result`` with named data as bytes instead of views of tensors."""
    store = getattr(result, "data_store_output", None)
    if isinstance(store, NamedDataStoreOutput):
        result.data_store_output = NamedDataStoreOutput(
            buffers=[bytes(memoryview(blob)) for blob in store.buffers],  # type: ignore[arg-type]
            pte_data=store.pte_data,
            external_data=store.external_data,
        )
    return cast("PreprocessResult", result)


class BackendDetails(ABC):
    """Compiler of a backend: converts partitions to bytes ahead of time.

    Backends are looked up by name: registered classes (``register_backend``), then imported
    classes, then entry points of the group ``lowerdeck.backends``.

    Attributes:
        backend_id: Name of the backend, if it differs from the class name.
        version: A text that changes when the compiler's output changes; it is part of the cache
            key in ``to_backend(..., cache=...)``.
        reads_only: Whether ``preprocess`` changes neither the program nor its tensors. If so, its
            argument shares the partition's graphs instead of copying them.

    Example:
        >>> class Verbatim(BackendDetails):
        ...     @staticmethod
        ...     def preprocess(edge_program, compile_specs):
        ...         return PreprocessResult(str(edge_program.graph).encode())
    """

    backend_id: ClassVar[str | None] = None
    version: ClassVar[str] = ""
    reads_only: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        """Return the compiled form of one partition.

        Args:
            edge_program: The partition as a separate program, which the backend may change.
            compile_specs: The settings from the partitioner.

        Returns:
            The blob, with its debug map and named data.

        Raises:
            Exception: Any error; it is reported with the partition's name and the source lines of
                its nodes.
        """

    @classmethod
    def preprocess_multimethod(
        cls,
        edge_programs: Mapping[str, Sequence[ExportedProgram]],
        compile_specs: Mapping[str, Sequence[list[CompileSpec]]],
    ) -> dict[str, list[PreprocessResult]]:
        """Return the compiled forms of all partitions of all methods.

        Override it if partitions share something, such as weights in the named data. The default
        calls ``preprocess`` for each partition.

        Args:
            edge_programs: For each method its partitions, in the order of the graph.
            compile_specs: For each method one list of specs per partition, in the same order.

        Returns:
            For each method one result per partition, in the same order.

        Raises:
            PreprocessError: The number of spec lists of a method is not its number of partitions.
        """
        results = {}
        for method, programs in edge_programs.items():
            specs = compile_specs.get(method)
            if specs is None or len(specs) != len(programs):
                raise PreprocessError(
                    f"method {method!r} has {len(programs)} partitions but "
                    f"{'no' if specs is None else len(specs)} lists of compile specs: "
                    "give one list per partition"
                )
            results[method] = [
                cls.preprocess(program, spec)
                for program, spec in zip(programs, specs, strict=True)
            ]
        return results
