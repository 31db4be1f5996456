"""Map instructions to their sources in the user's code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from torch import fx
from torch.export import ExportedProgram

from lowerdeck.emitter.frontend.provenance import Provenance
from lowerdeck.emitter.ir.instructions import Code, DelegateStep, KernelStep, Step
from lowerdeck.serializer import Frame, FrameList
from lowerdeck.torch_base import module_path, source_frame, source_frames


class InstructionSource(NamedTuple):
    """Source of one instruction.

    Attributes:
        handles: Debug handles of the nodes that the instruction computes.
        operator: A kernel's full name, a backend's id, ``"move"`` or ``"jump"``; inside a
            delegate, the target of the node.
        node: Name of the node in the caller's program, "" for steps that the emitter added.
        source_line: ``File "...", line N, in f``, "" when unknown.
        module_path: Path of the node's module, such as ``"layers.0.attention"``, "" when unknown.
        results: Number of tensors that the instruction computes.
    """

    handles: tuple[int, ...]
    operator: str
    node: str = ""
    source_line: str = ""
    module_path: str = ""
    results: int = 0


@dataclass(frozen=True, slots=True)
class DelegateSource:
    """Debug map of one delegate call, from its backend.

    Attributes:
        handles: Debug handles of the call itself.
        debug_handle_map: The backend's own map, from its identifiers to debug handles.
        sources: Source of each node inside the delegate, keyed by the node's debug handle.
    """

    backend_id: str
    handles: tuple[int, ...]
    debug_handle_map: Mapping[Any, Any]
    sources: Mapping[int, InstructionSource] = field(default_factory=dict)


class DebugTrace:
    """Maps steps to the nodes of the caller's program.

    Args:
        exported: The caller's program, before decomposition.
        unused: Iterator of unused handles, for nodes that have none.
    """

    def __init__(self, exported: ExportedProgram, unused: Iterator[int]) -> None:
        self._provenance = Provenance(exported)
        self._unused = unused
        self._assigned: dict[fx.Node, int] = {}

    def sources(self, code: Code) -> dict[int, InstructionSource]:
        """Return the source of each step, keyed by the step's index."""
        return {index: self._source(step) for index, step in enumerate(code.steps)}

    def delegates(self, code: Code) -> dict[int, DelegateSource]:
        """Return the debug information of each delegate call, keyed by the index of its step."""
        sources: dict[int, DelegateSource] = {}
        for index, step in enumerate(code.steps):
            if isinstance(step, DelegateStep):
                meta = getattr(step.module, "meta", None) or {}
                inside = meta.get("debug_handle_map") or {}
                sources[index] = DelegateSource(
                    step.module.backend_id,
                    self._source(step).handles,
                    inside,
                    _inner_sources(getattr(step.module, "original_module", None)),
                )
        return sources

    def _source(self, step: Step) -> InstructionSource:
        operator = _operator(step)
        if step.origin is None:
            return InstructionSource((), operator, results=len(step.writes))
        node = self._provenance.source(step.origin) or step.origin
        return InstructionSource(
            (self._handle(node),),
            operator,
            node.name,
            _location(node),
            module_path(node),
            len(step.writes),
        )

    def _handle(self, node: fx.Node) -> int:
        handle = node.meta.get("debug_handle")
        if isinstance(handle, int):
            return handle
        if node not in self._assigned:
            self._assigned[node] = next(self._unused)
        return self._assigned[node]


def unused_handles(programs: Iterable[ExportedProgram]) -> Iterator[int]:
    """Return an iterator of debug handles that no node of ``programs`` has."""
    highest = 0
    for exported in programs:
        for node in Provenance(exported).nodes:
            handle = node.meta.get("debug_handle")
            if isinstance(handle, int):
                highest = max(highest, handle)
    return count(highest + 1)


def _inner_sources(exported: Any) -> dict[int, InstructionSource]:
    """Return the source of each node of a delegate's original program, by debug handle."""
    if not isinstance(exported, ExportedProgram):
        return {}
    sources: dict[int, InstructionSource] = {}
    for node in Provenance(exported).nodes:
        handle = node.meta.get("debug_handle")
        if isinstance(handle, int):
            sources[handle] = InstructionSource(
                (handle,), str(node.target), node.name, _location(node), module_path(node)
            )
    return sources


def _operator(step: Step) -> str:
    if isinstance(step, KernelStep):
        return step.kernel.full_name
    if isinstance(step, DelegateStep):
        return str(step.module.backend_id)
    return type(step).__name__.removesuffix("Step").lower()


def _location(node: fx.Node) -> str:
    frame = source_frame(node)
    return frame.location if frame else ""


def stack_frames(origin: fx.Node | None) -> FrameList:
    """Return the stack trace of a node as frames of the file format, outermost first."""
    frames = source_frames(origin) if origin is not None else ()
    return FrameList([Frame(f.file, f.line, f.function, f.code) for f in frames])
