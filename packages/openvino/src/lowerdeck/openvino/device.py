"""OpenVINO itself: compiling a model for a device, and the payload that the runtime imports."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cache

import openvino

from lowerdeck.openvino.errors import DeviceError
from lowerdeck.openvino.precision import multiplies_in_subgraphs, with_precision_kept

# The key under which the runtime looks for the name of the device.
DEVICE = "device"
# Ours: whether float32 is kept, or the device chooses. The runtime does not look at it.
PRECISION = "precision"
_NO_KERNELS_OF_ITS_OWN = {"SNIPPETS_MODE": "DISABLE"}


@cache
def core() -> openvino.Core:
    """Return OpenVINO's entry, made once: it looks for devices, which takes a while."""
    return openvino.Core()


def device_of(compile_specs: Mapping[str, bytes]) -> str:
    """Return the device that compile specs name, the processor where they name none.

    Raises:
        DeviceError: It is not on this machine.
    """
    # Other than the text, the runtime takes a trailing zero byte for a part of the name.
    name = bytes(compile_specs.get(DEVICE, b"CPU")).decode(errors="replace")
    available = core().available_devices
    if name.partition(".")[0] not in available:
        raise DeviceError(
            f"found device {name!r}, expected one of {', '.join(available)}: payloads are "
            "compiled on the device that runs them"
        )
    return name


def payload_of(model: openvino.Model, device: str, *, keep_precision: bool = True) -> bytes:
    """Return the bytes that the runtime imports.

    Args:
        model: What is to be compiled.
        device: Where it is to run.
        keep_precision: Whether every operator is computed in the precision that it has.

    Raises:
        RuntimeError: OpenVINO cannot compile it.
        CompileError: It lays out payloads otherwise than the versions that are known.
    """
    keeps = keep_precision and device.startswith("CPU")
    settings = {"INFERENCE_PRECISION_HINT": "f32"} if keep_precision else {}
    if device.startswith("CPU") and {operator.get_type_name() for operator in model.get_ops()} >= {
        "MatMul",
        "Softmax",
    }:
        # Attention would become a fused kernel, which in bfloat16 has two precisions and
        # cannot be compiled; without such kernels models of attention are as fast (within 3 %).
        settings |= _NO_KERNELS_OF_ITS_OWN
    payload = _exported(model, device, settings)
    if keeps and multiplies_in_subgraphs(payload):
        # Linear layers in a row become one too. It heeds no mark of precision when it is imported,
        # or it cannot be: on processors with bfloat16 float32 was off by 4e-4.
        payload = _exported(model, device, settings | _NO_KERNELS_OF_ITS_OWN)
    return with_precision_kept(payload) if keeps else payload


def _exported(model: openvino.Model, device: str, settings: Mapping[str, str]) -> bytes:
    exported = core().compile_model(model, device, dict(settings)).export_model()
    return exported.getvalue() if isinstance(exported, io.BytesIO) else bytes(exported)
