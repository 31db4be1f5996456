"""Send a partition to another process, have it preprocessed there, and bring the result back."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from lowerdeck.lowered_module.authoring.backend import PreprocessResult, with_plain_bytes
from lowerdeck.lowered_module.errors import PreprocessError
from lowerdeck.lowered_module.program.debug_handles import HANDLE
from lowerdeck.torch_base import graphs_of

# torch.export.save and load keep what they are doing in globals.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class _NodeIndex:
    """Stands for a node, by its index in its graph."""

    number: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """A partition as bytes, with what torch's own format leaves out.

    Attributes:
        program: The partition in the format of ``torch.export.save``.
        handles: The debug handle of each node, in order, None where there is none.
        custom: The user's metadata of each node, in order: torch's format keeps not all of it.
        arguments: The arguments of each node, exactly: torch's format makes lists of tuples.
        backend: The backend class.
        compile_specs: What the backend is told.
    """

    program: bytes
    handles: tuple[int | None, ...]
    custom: tuple[Any, ...]
    arguments: tuple[Any, ...]
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
        with _one_at_a_time, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(program, stream)
    except Exception as error:
        raise PreprocessError(
            f"a partition cannot be sent to an executor: torch.export.save says {error}. Lower "
            "without an executor"
        ) from error
    graphs = list(graphs_of(program.graph_module))
    return Parcel(
        stream.getvalue(),
        tuple(node.meta.get(HANDLE) for gm in graphs for node in gm.graph.nodes),
        tuple(node.meta.get("custom") for gm in graphs for node in gm.graph.nodes),
        tuple(found for gm in graphs for found in _arguments(gm)),
        backend,
        compile_specs,
    )


def preprocess_parcel(parcel: Parcel) -> PreprocessResult:
    """Return what the backend makes of a parcel; runs in the other process.

    Args:
        parcel: From ``pack``.

    Raises:
        PreprocessError: The program did not arrive as it was sent.
        Exception: Whatever the backend raises.
    """
    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.load(io.BytesIO(parcel.program))
    graphs = list(graphs_of(program.graph_module))
    nodes = [node for gm in graphs for node in gm.graph.nodes]
    if len(nodes) != len(parcel.handles):
        raise PreprocessError(
            f"a partition of {len(parcel.handles)} nodes arrived with {len(nodes)}: use the same "
            "torch on both sides, or lower without an executor"
        )
    for node, handle, custom in zip(nodes, parcel.handles, parcel.custom, strict=True):
        if handle is not None:
            node.meta[HANDLE] = handle
        if custom is not None:
            node.meta["custom"] = custom
    arguments = iter(parcel.arguments)
    for gm in graphs:
        _set_arguments(gm, arguments)
    return with_plain_bytes(parcel.backend.preprocess(program, parcel.compile_specs))


def _arguments(graph_module: GraphModule) -> Iterator[Any]:
    index_of = {node: number for number, node in enumerate(graph_module.graph.nodes)}

    def named(value: object) -> object:
        return _NodeIndex(index_of[value]) if isinstance(value, Node) else value

    for node in graph_module.graph.nodes:
        yield map_aggregate((node.args, node.kwargs), named)  # type: ignore[arg-type]


def _set_arguments(graph_module: GraphModule, arguments: Iterator[Any]) -> None:
    nodes = list(graph_module.graph.nodes)

    def found(value: object) -> object:
        return nodes[value.number] if isinstance(value, _NodeIndex) else value

    for node in nodes:
        node.args, node.kwargs = map_aggregate(next(arguments), found)  # type: ignore[arg-type]
