"""Time the operators of a payload with OpenVINO's profiling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import openvino

from lowerdeck.openvino.errors import BlobError
from lowerdeck.openvino.payload import operator_numbers

_RUN = openvino.ProfilingInfo.Status.EXECUTED


@dataclass(frozen=True, slots=True)
class Watched:
    """A second import of a payload with profiling enabled, which slows every call.

    Attributes:
        request: The inference request.
        numbers: Index of each operator in the payload, by name.
    """

    compiled: openvino.CompiledModel
    request: openvino.InferRequest
    numbers: dict[str, int]

    @property
    def names(self) -> dict[int | str, str]:
        """Names of the operators, each with the kernel that OpenVINO selected."""
        return {
            self._identifier(info): f"{info.node_type} ({info.exec_type})"
            for info in self.request.get_profiling_info()
        }

    def spent(self) -> Iterator[tuple[int | str, int]]:
        """Yield each operator that the last call ran, with its nanoseconds."""
        for info in self.request.get_profiling_info():
            if info.status == _RUN:
                yield self._identifier(info), round(info.real_time.total_seconds() * 1e9)

    def _identifier(self, info: openvino.ProfilingInfo) -> int | str:
        # Additional work of the device, such as layout changes, has only a name. Profiles separate
        # a delegate and its parts by slashes.
        name: str = info.node_name
        return self.numbers.get(name, name.replace("/", "."))


def watched(core: openvino.Core, blob: memoryview, device: str) -> Watched:
    """Import a payload with profiling enabled.

    Args:
        blob: The payload, which was imported before.
        device: The device that runs it.
    """
    compiled = core.import_model(bytes(blob), device, {"PERF_COUNT": True})
    try:
        numbers = operator_numbers(blob)
    except BlobError:
        numbers = {}  # of another device
    return Watched(compiled, compiled.create_infer_request(), numbers)
