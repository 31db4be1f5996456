"""Profile of a call: times and results of instructions, as a table or a Chrome trace."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

from lowerdeck.runner.debug_info import SourceFinder, SourceLocation, merged
from lowerdeck.runner.delegates import DelegateStep, Precision
from lowerdeck.runner.instructions import BoundChain, Step
from lowerdeck.runner.memory.poison import Poison
from lowerdeck.runner.values.frame import Frame
from lowerdeck.serializer import printable

_MAX_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Event:
    """Execution of an instruction, or of an operator in a delegate.

    Attributes:
        instruction: Index in the chain.
        name: Operator; in a delegate, followed by a slash and the debug identifier.
        start_ns: Start in nanoseconds from the start of the call.
        place: Source location.
        values: Copies of the results, if requested.
        identifier: Debug identifier in a delegate, None for instructions.
        label: Operator in a delegate, such as ``Conv2d``, if the backend's runtime reports it.
        precision: Precision in a delegate, if reported as less than float32.
        backend: Backend id of delegate calls and of events in them.
    """

    chain: int
    instruction: int
    name: str
    start_ns: int
    duration_ns: int
    place: SourceLocation = field(default_factory=SourceLocation)
    values: tuple[Any, ...] = ()
    identifier: int | str | None = None
    label: str = ""
    precision: Precision | None = None
    backend: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """Times of one call of a method.

    Attributes:
        result: Result of the call.
        events: Events, ordered by end time.
        digest: The serializer's ``method_digest``, which identifies the method in traces.
    """

    method: str
    result: Any
    events: tuple[Event, ...]
    digest: str = ""

    @property
    def total_ns(self) -> int:
        """Return the time spent in instructions, in nanoseconds."""
        return sum(event.duration_ns for event in self.events if event.identifier is None)

    def table(self, *, limit: int | None = None, by_name: bool = False) -> str:
        """Return the events as a table.

        Args:
            limit: Number of rows, slowest first; None for all, in execution order.
            by_name: Whether to aggregate the events by operator, slowest first.
        """
        if by_name:
            return self._by_name(limit)
        events = list(self.events)
        if limit is not None:
            events = sorted(events, key=lambda event: -event.duration_ns)[:limit]
        rows = [("#", "us", "%", "operator", "shape", "module", "source")]
        for event in events:
            rows.append(
                (
                    str(event.instruction) if event.identifier is None else "",
                    f"{event.duration_ns / 1e3:.1f}",
                    self._share(event.duration_ns),
                    f"{event.name} {event.label}".rstrip(),
                    ", ".join(shape_text(value) for value in event.values),
                    event.place.module_path,
                    event.place.source_line,
                )
            )
        return _aligned(rows)

    def chrome_trace(self) -> str:
        """Return the events as JSON for ``chrome://tracing`` and https://ui.perfetto.dev."""
        events = [
            {
                "name": event.name,
                "cat": "instruction" if event.identifier is None else "delegate",
                "ph": "X",
                "ts": event.start_ns / 1e3,
                "dur": event.duration_ns / 1e3,
                "pid": self.method,
                "tid": 0,
                "args": {
                    "instruction": event.instruction,
                    "chain": event.chain,
                    "handles": list(event.place.handles),
                    "node": event.place.node,
                    "module": event.place.module_path,
                    "source": event.place.source_line,
                    "label": event.label,
                    "shapes": [shape_text(value) for value in event.values],
                    "samples": _samples(event.values),
                },
            }
            for event in self.events
        ]
        document: dict[str, Any] = {"traceEvents": events, "displayTimeUnit": "ns"}
        if self.digest:
            document["otherData"] = {"digests": {self.method: self.digest}}
        return json.dumps(document)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the Chrome trace to ``path``.

        Args:
            path: The file, by convention ending in ``.json``.
        """
        Path(path).write_text(self.chrome_trace(), encoding="utf-8")

    def _by_name(self, limit: int | None) -> str:
        totals: dict[str, list[int]] = {}
        for event in self.events:
            delegate = event.name.rpartition("/")[0]
            name = f"{delegate}/{event.label}" if event.label else event.name
            totals.setdefault(name, []).append(event.duration_ns)
        rows = [("calls", "us", "%", "operator")]
        for name, times in sorted(totals.items(), key=lambda item: -sum(item[1]))[:limit]:
            spent = sum(times)
            rows.append((str(len(times)), f"{spent / 1e3:.1f}", self._share(spent), name))
        return _aligned(rows)

    def _share(self, duration_ns: int) -> str:
        return f"{100 * duration_ns / max(self.total_ns, 1):.1f}"


class Recorder:
    """Observer that collects the events of a call.

    Args:
        sources: Maps instructions to source locations.
        poison: Fills dead memory after results are copied.
        keep_values: Whether to copy the results of each instruction.
    """

    def __init__(
        self,
        chains: Sequence[BoundChain],
        frame: Frame,
        sources: SourceFinder,
        poison: Poison | None,
        *,
        keep_values: bool,
    ) -> None:
        self.events: list[Event] = []
        self._chains = chains
        self._frame = frame
        self._sources = sources
        self._poison = poison
        self._keep_values = keep_values
        self._origin = perf_counter_ns()

    def __call__(self, chain: int, index: int, step: Step) -> int | None:
        """Run ``step``, record its event and return its result.

        Args:
            chain: Number of the chain.
        """
        item = self._chains[chain].instructions[index]
        run = step
        if isinstance(step, DelegateStep):
            run = self._logging(step, chain, index, item.name)
        start = perf_counter_ns()
        target = run()
        end = perf_counter_ns()
        values = tuple(_copy(self._frame.registers[i]) for i in self._kept(item.writes))
        if self._poison is not None:
            self._poison.finish(chain, index)
        self.events.append(
            Event(
                chain,
                index,
                item.name,
                start - self._origin,
                end - start,
                self._sources.of(chain, index),
                values,
                backend=step.backend_id if isinstance(step, DelegateStep) else "",
            )
        )
        return target

    def _kept(self, written: Sequence[int]) -> Sequence[int]:
        return written if self._keep_values else ()

    def _logging(self, step: DelegateStep, chain: int, index: int, name: str) -> Step:
        def log(
            identifier: int | str,
            start_ns: int,
            end_ns: int,
            outputs: Sequence[torch.Tensor] = (),
            label: str = "",
            precision: Precision | None = None,
        ) -> None:
            place = merged(self._sources.inside(index, identifier))
            values = tuple(map(_copy, outputs)) if self._keep_values else ()
            self.events.append(
                Event(
                    chain,
                    index,
                    f"{name}/{identifier}",
                    start_ns - self._origin,
                    end_ns - start_ns,
                    place,
                    values,
                    identifier,
                    label,
                    precision,
                    step.backend_id,
                )
            )

        return lambda: step.logged(log)


def _copy(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value


def shape_text(value: object) -> str:
    """Return the dtype and shape of a tensor, or another value as text."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    name = str(value.dtype).removeprefix("torch.")
    return f"{name}[{'x'.join(map(str, value.shape))}]"


def _samples(values: Sequence[Any]) -> list[float | None]:
    """Return sample elements of the first result, at positions that depend only on its size."""
    first = values[0] if values else None
    if not isinstance(first, torch.Tensor) or first.dtype.is_complex or first.numel() == 0:
        return []
    flat = first.detach().reshape(-1)
    samples = flat[:: -(-flat.numel() // _MAX_SAMPLES)].double().tolist()
    # JSON has neither infinity nor NaN.
    return [round(number, 9) if math.isfinite(number) else None for number in samples]


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Return ``rows`` aligned in columns; the first three are right-aligned numbers."""
    rows = [tuple(map(printable, row)) for row in rows]  # names are untrusted
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if number < 3 else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
