"""The half that runs payloads, and what it says of payloads and inputs that do not fit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import torch
from openvino_cases import numbers  # type: ignore[import-not-found]

from lowerdeck.emitter import emit
from lowerdeck.inspect import html_report
from lowerdeck.lowered_module import get_lowered_backend_modules, to_backend
from lowerdeck.openvino import (
    BlobError,
    DelegateInputError,
    DeviceError,
    OpenvinoBackend,
    OpenvinoPartitioner,
    OpenvinoRuntime,
    decode_payload,
)
from lowerdeck.runner import compare, load
from lowerdeck.serializer import CompileSpec, deserialize_pte
from lowerdeck_zoo import Of

_DATA = re.compile(r'id="report-data">(.*?)</script>', re.DOTALL)
CPU = [CompileSpec("device", b"CPU")]


@pytest.fixture(scope="module")
def delegate() -> Any:
    program = torch.export.export(Of(torch.relu), (numbers(2, 3),))
    (found,) = get_lowered_backend_modules(to_backend(program, OpenvinoPartitioner()).graph_module)
    return found


@pytest.fixture(scope="module")
def blob(delegate: Any) -> bytes:
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


def test_the_compile_specs_name_the_version_that_compiled(delegate: Any) -> None:
    specs = [CompileSpec(spec.key, spec.value) for spec in delegate.compile_specs]
    installed = metadata.version("openvino")
    assert CompileSpec("openvino", installed.encode()) in specs
    with pytest.raises(BlobError, match=re.escape(f"another version ({installed!r}): ")):
        OpenvinoRuntime().init(memoryview(b"cut off"), specs, {})


def test_a_version_from_a_damaged_file_is_shown_escaped_and_cut() -> None:
    specs = [*CPU, CompileSpec("openvino", b"\x1b[2J\n\xff" + bytes(10**6))]
    with pytest.raises(BlobError) as found:
        OpenvinoRuntime().init(memoryview(b"cut off"), specs, {})
    assert r"\x1b[2J\n" in str(found.value)
    assert str(found.value).isprintable()
    assert len(str(found.value)) < 1000


@pytest.mark.parametrize("cut", [0, 3, 100])
def test_a_payload_that_is_cut_off(blob: bytes, cut: int) -> None:
    with pytest.raises(BlobError, match=f"cannot import a payload of {cut} bytes: it is damaged"):
        OpenvinoRuntime().init(memoryview(blob[:cut]), CPU, {})


def test_a_profile_tells_each_operator_s_time_and_kernel_and_the_page_has_them() -> None:
    layers = (
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(144, 9),
    )
    image = numbers(1, 3, 8, 8)
    model = torch.nn.Sequential(*layers).eval()
    file = emit(to_backend(torch.export.export(model, (image,)), OpenvinoPartitioner())).to_bytes()
    profile = load(file).method().profile(image)
    torch.testing.assert_close(profile.result, model(image))
    inside = [event for event in profile.events if event.identifier is not None]
    (blob,) = deserialize_pte(file).backend_delegate_data
    nodes = decode_payload(memoryview(bytes(blob.data))).nodes  # type: ignore[arg-type]
    told = {one.identifier: one.label for one in inside if isinstance(one.identifier, int)}
    assert told
    for number, label in told.items():
        assert label.startswith(f"{nodes[number].operator} (")
    page = html_report(deserialize_pte(file), trace=profile.chrome_trace())
    (timed,) = json.loads(_DATA.findall(page)[0])["file"]["methods"]
    parts = timed["watched"][0]["parts"]
    assert {number for number, time in enumerate(parts) if time is not None} == {*told}


def test_comparing_goes_on_where_a_delegate_tells_times_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval()
    lowered = to_backend(torch.export.export(model, (numbers(1, 3, 8, 8),)), OpenvinoPartitioner())
    file = emit(lowered)
    found = compare(load(file.to_bytes(), debug=file), model, (numbers(1, 3, 8, 8),))
    assert found.first is None
    assert found.compared
    # Times are nothing that eager could have a counterpart of.
    assert all(event.identifier is None for event in found.unmatched)


def test_a_device_that_is_not_there(blob: bytes) -> None:
    with pytest.raises(DeviceError, match="TOASTER"):
        OpenvinoRuntime().init(memoryview(blob), [CompileSpec("device", b"TOASTER")], {})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "found 0 inputs; expected 1"),
        ([numbers(3, 2)], r"of shape \[2,3\]; found a torch.float32 tensor of shape \(3, 2\)"),
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
