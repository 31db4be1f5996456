"""Runtime of OpenVINO delegates, for ``lowerdeck.runner``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import openvino
import torch

from lowerdeck.openvino.device import RELEASE, core, device_of
from lowerdeck.openvino.errors import BlobError, DelegateInputError, DelegateRunError
from lowerdeck.openvino.layout import CHANNELS_LAST, from_memory_order, memory_order
from lowerdeck.openvino.profiling import ProfiledPayload, import_profiled
from lowerdeck.openvino.translation import TYPES
from lowerdeck.serializer import CompileSpec

_DTYPES = {name: dtype for dtype, name in TYPES.items()}

_LONGEST = 40
"""Bytes of a file's version that an error shows."""


@dataclass(frozen=True, slots=True)
class LoadedPayload:
    """An imported payload."""

    compiled: openvino.CompiledModel
    request: openvino.InferRequest
    blob: memoryview
    device: str
    _profiled: list[ProfiledPayload] = field(default_factory=list)

    def profiled(self) -> ProfiledPayload:
        """Return the payload imported with profiling, lazily."""
        if not self._profiled:
            self._profiled.append(import_profiled(core(), self.blob, self.device))
        return self._profiled[0]


class OpenvinoRuntime:
    """Run payloads with OpenVINO."""

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[CompileSpec],
        named_data: Mapping[str, memoryview],  # noqa: ARG002  (weights are in the payload)
    ) -> LoadedPayload:
        """Return an imported payload.

        Args:
            blob: A payload from this package's backend or from ExecuTorch's.

        Raises:
            BlobError: The payload is damaged, or was compiled by another version of OpenVINO.
            DeviceError: The device is not available.
        """
        specs = {spec.key: bytes(cast("memoryview", spec.value)) for spec in compile_specs}
        device = device_of(specs)
        try:
            compiled = core().import_model(bytes(blob), device)
        except RuntimeError as error:
            release = specs.get(RELEASE, b"")[:_LONGEST].decode(errors="replace")
            by = f" ({release!r})" if release else ""
            raise BlobError(
                f"openvino {openvino.__version__} cannot import a payload of {len(blob)} bytes: "
                f"it is damaged, or was compiled by another version{by}: {_last_line(error)}"
            ) from error
        return LoadedPayload(compiled, compiled.create_infer_request(), blob, device)

    def input_count(self, handle: LoadedPayload) -> int:
        """Return the number of inputs of a payload."""
        return len(handle.compiled.inputs)

    def execute(self, handle: LoadedPayload, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for ``inputs``, as new tensors.

        Raises:
            DelegateInputError: The inputs do not match the payload's.
            DelegateRunError: OpenVINO fails.
        """
        return _run(handle.request, handle.compiled, inputs)

    def execute_logged(
        self, handle: LoadedPayload, inputs: Sequence[torch.Tensor], log: Callable[..., None]
    ) -> list[torch.Tensor]:
        """Return the outputs for ``inputs``, and log OpenVINO's time of each operator.

        Operators that OpenVINO fused into others are not logged.

        Args:
            log: Called with the identifier, start and end in nanoseconds, no outputs, and the
                operator's name with its kernel. The identifier is the operator's index in the
                payload, or the name of other device work.

        Returns:
            New tensors.

        Raises:
            DelegateInputError: The inputs do not match the payload's.
            DelegateRunError: OpenVINO fails.
        """
        profiled = handle.profiled()
        start = time.perf_counter_ns()
        results = _run(profiled.request, profiled.compiled, inputs)
        for identifier, label, spent in profiled.spent():
            # OpenVINO measures no start times: events are logged one after another.
            log(identifier, start, start + spent, (), label)
            start += spent
        return results


def _run(
    request: openvino.InferRequest,
    compiled: openvino.CompiledModel,
    inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    ports = compiled.inputs
    if len(inputs) != len(ports):
        raise DelegateInputError(f"found {len(inputs)} inputs; expected {len(ports)}")
    for number, (value, port) in enumerate(zip(inputs, ports, strict=True)):
        _check(number, value, port)
        tensor = openvino.Tensor(memory_order(value).numpy(), shared_memory=False)
        request.set_input_tensor(number, tensor)
    try:
        request.infer()
    except RuntimeError as error:
        raise DelegateRunError(f"OpenVINO failed: {_last_line(error)}") from error
    results = []
    for number, port in enumerate(compiled.outputs):
        result = torch.from_numpy(request.get_output_tensor(number).data.copy())
        is_channels_last = any(name.endswith(CHANNELS_LAST) for name in port.get_names())
        results.append(from_memory_order(result) if is_channels_last else result)
    return results


def _last_line(error: RuntimeError) -> str:
    """Return the last line of OpenVINO's error, without its source locations."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _check(number: int, tensor: object, port: openvino.ConstOutput) -> None:
    dtype = _DTYPES.get(port.get_element_type())
    fits = (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype == dtype
        and port.get_partial_shape().compatible(openvino.PartialShape(list(tensor.shape)))
    )
    if not fits:
        actual = (
            f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
            if isinstance(tensor, torch.Tensor)
            else f"a {type(tensor).__name__}"
        )
        raise DelegateInputError(
            f"input {number} must be a {dtype} tensor of shape {port.get_partial_shape()}; "
            f"found {actual}"
        )
