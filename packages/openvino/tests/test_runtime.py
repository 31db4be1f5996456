"""The half that runs payloads, and what it says of payloads and inputs that do not fit."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import torch
from openvino_cases import Calls, numbers  # type: ignore[import-not-found]

from lowerdeck.lowered_module import get_lowered_backend_modules, to_backend
from lowerdeck.openvino import (
    BlobError,
    DelegateInputError,
    DeviceError,
    OpenvinoBackend,
    OpenvinoPartitioner,
    OpenvinoRuntime,
)
from lowerdeck.serializer import CompileSpec

CPU = [CompileSpec("device", b"CPU")]


@pytest.fixture(scope="module")
def blob() -> bytes:
    program = torch.export.export(Calls(torch.relu), (numbers(2, 3),))
    (delegate,) = get_lowered_backend_modules(
        to_backend(program, OpenvinoPartitioner()).graph_module
    )
    return bytes(delegate.processed_bytes)


def test_a_cache_keeps_the_results_of_releases_apart() -> None:
    assert metadata.version("lowerdeck-openvino") in OpenvinoBackend.version


def test_it_runs_what_was_compiled(blob: bytes) -> None:
    runtime = OpenvinoRuntime()
    handle = runtime.init(memoryview(blob), CPU, {})
    assert runtime.input_count(handle) == 1
    (found,) = runtime.execute(handle, [numbers(2, 3)])
    (again,) = runtime.execute(handle, [numbers(2, 3, seed=1)])
    assert torch.equal(found, numbers(2, 3).relu())  # the second call left the first's result
    assert torch.equal(again, numbers(2, 3, seed=1).relu())


@pytest.mark.parametrize("cut", [0, 3, 100])
def test_a_payload_that_is_cut_off(blob: bytes, cut: int) -> None:
    with pytest.raises(BlobError, match=f"cannot import a payload of {cut} bytes: it is damaged"):
        OpenvinoRuntime().init(memoryview(blob[:cut]), CPU, {})


def test_a_device_that_is_not_there(blob: bytes) -> None:
    with pytest.raises(DeviceError, match="TOASTER"):
        OpenvinoRuntime().init(memoryview(blob), [CompileSpec("device", b"TOASTER")], {})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "1 inputs are needed, found 0"),
        ([numbers(3, 2)], r"tensor of \[2,3\], found a torch.float32 tensor of \(3, 2\)"),
        ([numbers(2, 3).half()], "must be a torch.float32 tensor"),
        ([7], "found a int"),
    ],
    ids=["none", "sizes", "dtype", "number"],
)
def test_inputs_that_do_not_fit(blob: bytes, inputs: list[Any], message: str) -> None:
    runtime = OpenvinoRuntime()
    with pytest.raises(DelegateInputError, match=message):
        runtime.execute(runtime.init(memoryview(blob), CPU, {}), inputs)


def test_importing_the_package_makes_no_backend_known_and_does_not_wait_for_openvino() -> None:
    code = (
        "import sys, lowerdeck.openvino as package; "
        "assert not {'openvino', 'lowerdeck.openvino.backend'} & set(sys.modules); "
        "package.OpenvinoRuntime; "
        "assert 'openvino' in sys.modules and 'lowerdeck.openvino.backend' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
