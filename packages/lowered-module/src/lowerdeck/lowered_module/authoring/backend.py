"""Backends: what an author implements, and the result of compilation."""

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
    """One key and its value, written into the file with the delegate's blob.

    Attributes:
        key: Name of the setting, such as ``"max_value"``.
        value: The setting as bytes; what they mean is between a backend and its runtime.
    """

    key: str
    value: bytes


DebugHandleMap = Mapping[int, tuple[int, ...]] | Mapping[str, tuple[int, ...]]


@dataclass(slots=True, init=False)
class PreprocessResult:
    """What a backend made of one partition.

    Attributes:
        processed_bytes: The blob that the backend's runtime half will be given. Empty bytes are
            allowed.
        debug_handle_map: For each debug identifier that the runtime half logs, the debug handles
            of its nodes (see ``DelegateMappingBuilder``); None where it logs none.
        data_store_output: Named data that the runtime half asks for by key, such as weights that
            several delegates share (from ``NamedDataStore.get_named_data_store_output()``).
        delegate_info_meta: Anything that tools ahead of time want to find in
            ``LoweredBackendModule.meta``; it does not reach the file. ExecuTorch calls it
            ``_delegate_info_meta``, which is taken, and can be read, as well.
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
    """Return ``result`` with named data as bytes, for those who take no view of a tensor's memory.

    Args:
        result: What a backend returned.
    """
    store = getattr(result, "data_store_output", None)
    if isinstance(store, NamedDataStoreOutput):
        result.data_store_output = NamedDataStoreOutput(
            buffers=[bytes(memoryview(blob)) for blob in store.buffers],  # type: ignore[arg-type]
            pte_data=store.pte_data,
            external_data=store.external_data,
        )
    return cast("PreprocessResult", result)


class BackendDetails(ABC):
    """The half of a backend that works ahead of time: it compiles partitions to bytes.

    A backend is found by its class name, through the entry-point group ``lowerdeck.backends``,
    ``register_backend`` or simply by being imported.

    Attributes:
        backend_id: The name to be found by, where it is not the class name.
        version: Anything hashable as text that changes when the compiler's output changes; part
            of the key under which ``to_backend(..., cache=...)`` keeps results.
        reads_only: Whether ``preprocess`` changes neither the program nor its tensors. Then it is
            given the partition itself, not a copy, and weights that were loaded from a file or
            mapped as they are; torch cannot share their memory until someone writes.

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
            edge_program: The partition as a separate program. The backend may change it:
                nothing else reads it, and its weights are copied only if it writes to them.
            compile_specs: What the partitioner wanted this backend to know.

        Returns:
            The blob, with its debug map and named data.

        Raises:
            Exception: Whatever the backend likes; it is reported with the partition's name and
                the lines of source that the partition came from.
        """

    @classmethod
    def preprocess_multimethod(
        cls,
        edge_programs: Mapping[str, Sequence[ExportedProgram]],
        compile_specs: Mapping[str, Sequence[list[CompileSpec]]],
    ) -> dict[str, list[PreprocessResult]]:
        """Return the compiled forms of all partitions of all methods.

        Override it where partitions share something, such as weights in the named data. By
        default it calls ``preprocess`` on each.

        Args:
            edge_programs: For each method its partitions, in the order of the graph.
            compile_specs: For each method one list of specs per partition, in the same order.

        Returns:
            For each method one result per partition, in the same order.

        Raises:
            PreprocessError: A method has no specs, or not one list per partition.
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
