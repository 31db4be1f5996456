"""Source locations of instructions: debug handles, source lines, module paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lowerdeck.serializer import ExecutionPlan

_TORCH = "-packages/torch/"
"""Substring of the paths of torch's files on any machine."""


class DebugMaps(Protocol):
    """Debug maps of an emission, such as the emitter's ``EmittedProgram``."""

    @property
    def debug_handle_map(self) -> Mapping[str, Mapping[int, Any]]:
        """Source of each instruction, by method.

        Sources have ``handles``, ``operator``, ``node``, ``source_line`` and ``module_path``;
        unknown strings are empty.
        """
        ...

    @property
    def delegate_debug_maps(self) -> Mapping[str, Mapping[int, Any]]:
        """The backend's debug map of each delegate call, by method."""
        ...


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """Location in the user's code.

    Attributes:
        handles: Debug handles of the nodes.
        node: Name of the (last) node, empty when unknown.
        source_line: The line, empty when unknown; several are joined.
        module_path: The module's path, empty when unknown; several are joined.
        operator: Operator of ``node``, empty when unknown.
    """

    handles: tuple[int, ...] = ()
    node: str = ""
    source_line: str = ""
    module_path: str = ""
    operator: str = ""


class SourceFinder:
    """Map the instructions of one method to source locations.

    Args:
        plan: The method; without maps, the stack traces in its instructions are used.
    """

    def __init__(self, plan: ExecutionPlan, maps: DebugMaps | None) -> None:
        self._plan = plan
        self._sources: Mapping[int, Any] = {}
        self._delegates: Mapping[int, Any] = {}
        if maps is not None:
            self._sources = maps.debug_handle_map.get(plan.name, {})
            self._delegates = maps.delegate_debug_maps.get(plan.name, {})

    def of(self, chain: int, instruction: int) -> SourceLocation:
        """Return the source of an instruction, empty if unknown."""
        source = self._sources.get(instruction) if chain == 0 else None
        if source is not None:
            return _place_of(source)
        traces = self._plan.chains[chain].stacktrace
        if not traces or instruction >= len(traces) or not traces[instruction].items:
            return SourceLocation()
        frames = traces[instruction].items
        frame = next((f for f in reversed(frames) if _TORCH not in f.filename), frames[-1])
        return SourceLocation(
            source_line=f'File "{frame.filename}", line {frame.lineno}, in {frame.name}'
        )

    def inside(self, instruction: int, identifier: int | str) -> list[SourceLocation]:
        """Return the sources of a debug identifier of a delegate.

        Args:
            instruction: Index of the delegate call.
            identifier: The identifier that the backend's runtime logged.
        """
        delegate = self._delegates.get(instruction)
        if delegate is None:
            return []
        handles = delegate.debug_handle_map.get(identifier, ())
        handles = (handles,) if isinstance(handles, int) else tuple(handles)
        sources = getattr(delegate, "sources", {})
        return [
            _place_of(sources[handle]) if handle in sources else SourceLocation((handle,))
            for handle in handles
        ]


def merged(parts: Sequence[SourceLocation]) -> SourceLocation:
    """Return the merged source of several nodes."""

    def joined(texts: Sequence[str]) -> str:
        return "; ".join(dict.fromkeys(text for text in texts if text))

    return SourceLocation(
        tuple(handle for part in parts for handle in part.handles),
        parts[-1].node if parts else "",
        joined([part.source_line for part in parts]),
        joined([part.module_path for part in parts]),
        parts[-1].operator if parts else "",
    )


def _place_of(source: Any) -> SourceLocation:
    return SourceLocation(
        tuple(source.handles),
        source.node,
        source.source_line,
        source.module_path,
        source.operator,
    )
