"""Send a partition to another process, have it preprocessed there, and bring the result back."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.export import ExportedProgram

from lowerdeck.lowered_module.backend import PreprocessResult
from lowerdeck.lowered_module.debug_handles import HANDLE
from lowerdeck.lowered_module.errors import PreprocessError
from lowerdeck.lowered_module.graphs import graphs_of
from lowerdeck.serializer import NamedDataStoreOutput


@dataclass(frozen=True, slots=True)
class Parcel:
    """A partition as bytes, with what torch's own format leaves out.

    Attributes:
        program: The partition in the format of ``torch.export.save``.
        handles: The debug handle of each node, in order, None where there is none.
        backend: The backend class.
        compile_specs: What the backend is told.
    """

    program: bytes
    handles: tuple[int | None, ...]
    backend: Any
    compile_specs: list[Any]


def pack(program: ExportedProgram, backend: Any, compile_specs: list[Any]) -> Parcel:
    """Return ``program`` ready to travel.

    Args:
        program: The partition.
        backend: Its backend class; the other side must be able to import it.
        compile_specs: What the backend is told.

    Raises:
        PreprocessError: torch cannot write the program, because it holds delegates, say.
    """
    stream = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(program, stream)
    except Exception as error:
        raise PreprocessError(
            f"a partition cannot be sent to an executor: torch.export.save says {error}. Lower "
            "without an executor"
        ) from error
    return Parcel(stream.getvalue(), tuple(_handles(program)), backend, compile_specs)


def preprocess_parcel(parcel: Parcel) -> PreprocessResult:
    """Return what the backend makes of a parcel; runs in the other process.

    Args:
        parcel: From ``pack``.

    Raises:
        PreprocessError: The program did not arrive as it was sent.
        Exception: Whatever the backend raises.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.load(io.BytesIO(parcel.program))
    nodes = [node for gm in graphs_of(program.graph_module) for node in gm.graph.nodes]
    if len(nodes) != len(parcel.handles):
        raise PreprocessError(
            f"a partition of {len(parcel.handles)} nodes arrived with {len(nodes)}: use the same "
            "torch on both sides, or lower without an executor"
        )
    for node, handle in zip(nodes, parcel.handles, strict=True):
        if handle is not None:
            node.meta[HANDLE] = handle
    return _plain(parcel.backend.preprocess(program, parcel.compile_specs))


def _handles(program: ExportedProgram) -> list[int | None]:
    return [
        node.meta.get(HANDLE) for gm in graphs_of(program.graph_module) for node in gm.graph.nodes
    ]


def _plain(result: Any) -> PreprocessResult:
    """Return ``result`` with buffers that can travel: views of tensors' memory cannot."""
    store = getattr(result, "data_store_output", None)
    if isinstance(store, NamedDataStoreOutput):
        result.data_store_output = NamedDataStoreOutput(
            buffers=[bytes(memoryview(blob)) for blob in store.buffers],  # type: ignore[arg-type]
            pte_data=store.pte_data,
            external_data=store.external_data,
        )
    return cast("PreprocessResult", result)
