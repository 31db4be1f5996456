"""Compile OpenVINO models to payloads for a device."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cache

import openvino

from lowerdeck.openvino.errors import DeviceError
from lowerdeck.openvino.precision import multiplies_in_subgraphs, with_precision_kept

# Compile spec key of the device name.
DEVICE = "device"
# Compile spec keys of the precision and of OpenVINO's release; the official runtime ignores both.
PRECISION = "precision"
RELEASE = "openvino"
_NO_GENERATED_KERNELS = {"SNIPPETS_MODE": "DISABLE"}


@cache
def core() -> openvino.Core:
    """Return the cached OpenVINO ``Core``."""
    return openvino.Core()


def device_of(compile_specs: Mapping[str, bytes]) -> str:
    """Return the device named in the compile specs; ``CPU`` by default.

    Raises:
        DeviceError: The device is not available.
    """
    # No terminating zero byte: the runtime would read it as a part of the name.
    name = bytes(compile_specs.get(DEVICE, b"CPU")).decode(errors="replace")
    available = core().available_devices
    if name.partition(".")[0] not in available:
        raise DeviceError(
            f"found device {name!r}; expected one of {', '.join(available)}: compile on a machine "
            "with the device that runs the payload"
        )
    return name


def payload_of(model: openvino.Model, device: str, *, keep_precision: bool = True) -> bytes:
    """Return the payload of a model.

    Args:
        device: Device that runs the payload.
        keep_precision: Whether float32 operators compute in float32.

    Raises:
        RuntimeError: OpenVINO cannot compile the model.
        CompileError: OpenVINO's payload has an unknown layout.
    """
    marks_precision = keep_precision and device.startswith("CPU")
    settings = {"INFERENCE_PRECISION_HINT": "f32"} if keep_precision else {}
    if device.startswith("CPU") and {operator.get_type_name() for operator in model.get_ops()} >= {
        "MatMul",
        "Softmax",
    }:
        # Fused attention kernels in bfloat16 have mixed precisions and cannot be compiled.
        settings |= _NO_GENERATED_KERNELS
    payload = _exported(model, device, settings)
    if marks_precision and multiplies_in_subgraphs(payload):
        # A kernel of fused linear layers ignores precision marks or cannot be imported.
        payload = _exported(model, device, settings | _NO_GENERATED_KERNELS)
    return with_precision_kept(payload) if marks_precision else payload


def _exported(model: openvino.Model, device: str, settings: Mapping[str, str]) -> bytes:
    exported = core().compile_model(model, device, dict(settings)).export_model()
    return exported.getvalue() if isinstance(exported, io.BytesIO) else bytes(exported)
