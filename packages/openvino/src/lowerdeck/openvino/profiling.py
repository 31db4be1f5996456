"""Time the operators of a payload with OpenVINO's profiling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import openvino

from lowerdeck.openvino.errors import BlobError
from lowerdeck.openvino.payload import operator_numbers

_RUN = openvino.ProfilingInfo.Status.EXECUTED


class ProfiledPayload(NamedTuple):
    """Payload imported with profiling, which slows calls.

    Attributes:
        numbers: Index of each operator in the payload, by name.
    """

    compiled: openvino.CompiledModel
    request: openvino.InferRequest
    numbers: dict[str, int]

    def spent(self) -> Iterator[tuple[int | str, str, int]]:
        """Yield each executed operator of the last call, its kernel, and its nanoseconds."""
        for info in self.request.get_profiling_info():
            if info.status == _RUN:
                spent = round(info.real_time.total_seconds() * 1e9)
                yield self._identifier(info), f"{info.node_type} ({info.exec_type})", spent

    def _identifier(self, info: openvino.ProfilingInfo) -> int | str:
        # Device work such as layout changes has only a name. Slashes are separators in profiles.
        name: str = info.node_name
        return self.numbers.get(name, name.replace("/", "."))


def import_profiled(core: openvino.Core, blob: memoryview, device: str) -> ProfiledPayload:
    """Return a payload imported with profiling."""
    compiled = core.import_model(bytes(blob), device, {"PERF_COUNT": True})
    try:
        numbers = operator_numbers(blob)
    except BlobError:
        numbers = {}  # of another device
    return ProfiledPayload(compiled, compiled.create_infer_request(), numbers)
