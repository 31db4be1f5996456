"""Compile OpenVINO models to payloads for a device."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cache

import openvino

from lowerdeck.openvino.errors import DeviceError
from lowerdeck.openvino.precision import multiplies_in_subgraphs, with_precision_kept

# The key that the runtime reads the device name from.
DEVICE = "device"
# Our own key: whether float32 is kept, or the device chooses. The runtime ignores it.
PRECISION = "precision"
_NO_KERNELS_OF_ITS_OWN = {"SNIPPETS_MODE": "DISABLE"}


@cache
def core() -> openvino.Core:
    """Return OpenVINO's ``Core``, created once: it searches for devices, which is slow."""
    return openvino.Core()


def device_of(compile_specs: Mapping[str, bytes]) -> str:
    """Return the device that compile specs name; the processor by default.

    Raises:
        DeviceError: The device is not on this machine.
    """
    # No terminating zero byte: the runtime would read it as a part of the name.
    name = bytes(compile_specs.get(DEVICE, b"CPU")).decode(errors="replace")
    available = core().available_devices
    if name.partition(".")[0] not in available:
        raise DeviceError(
            f"found device {name!r}, expected one of {', '.join(available)}: payloads are "
            "compiled on the device that runs them"
        )
    return name


def payload_of(model: openvino.Model, device: str, *, keep_precision: bool = True) -> bytes:
    """Return the payload of a model.

    Args:
        device: The device that will run it.
        keep_precision: Whether every operator is computed in its own precision.

    Raises:
        RuntimeError: OpenVINO cannot compile it.
        CompileError: OpenVINO's payload has an unknown layout.
    """
    keeps = keep_precision and device.startswith("CPU")
    settings = {"INFERENCE_PRECISION_HINT": "f32"} if keep_precision else {}
    if device.startswith("CPU") and {operator.get_type_name() for operator in model.get_ops()} >= {
        "MatMul",
        "Softmax",
    }:
        # Attention would become a fused kernel, which in bfloat16 has two precisions and
        # cannot be compiled. Models with attention are as fast without such kernels (within 3 %).
        settings |= _NO_KERNELS_OF_ITS_OWN
    payload = _exported(model, device, settings)
    if keeps and multiplies_in_subgraphs(payload):
        # Consecutive linear layers become one kernel as well. Marks of precision have no effect on
        # it, or it cannot be imported: float32 was off by 4e-4 on processors with bfloat16.
        payload = _exported(model, device, settings | _NO_KERNELS_OF_ITS_OWN)
    return with_precision_kept(payload) if keeps else payload


def _exported(model: openvino.Model, device: str, settings: Mapping[str, str]) -> bytes:
    exported = core().compile_model(model, device, dict(settings)).export_model()
    return exported.getvalue() if isinstance(exported, io.BytesIO) else bytes(exported)
