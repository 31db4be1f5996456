"""The backend that fuses and decomposes: numbers, debug maps, refusals, damaged blobs."""

from __future__ import annotations

import pytest
import torch
from demo_lowering import delegates, lower, named_data, run, run_blob, sealed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowerdeck.demo_backends import (
    OWN_IDENTIFIERS,
    BackendWithDelegateMappingDemo,
    BlobError,
    DelegateInputError,
    DelegateMappingDemoPartitioner,
    DelegateMappingDemoRuntime,
    DelegateRunError,
)
from lowerdeck.lowered_module import LoweredBackendModule, UnsupportedOperatorError, to_backend
from lowerdeck_zoo import Of, exported

# torch's own, from copying a tree spec inside run_decompositions
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning")
RUNTIME = DelegateMappingDemoRuntime()


@pytest.fixture(scope="module")
def lowered() -> LoweredBackendModule:
    model, inputs = BackendWithDelegateMappingDemo.get_test_model_and_inputs()
    (delegate,) = delegates(lower(model, inputs, DelegateMappingDemoPartitioner()))
    return delegate


def instructions(delegate: LoweredBackendModule) -> list[str]:
    lines = delegate.processed_bytes.decode().splitlines()
    return [",".join(line.split(" ")[:2]) for line in lines[2:-1]]


def test_convolution_and_relu_are_one_instruction_and_tan_is_three(
    lowered: LoweredBackendModule,
) -> None:
    assert instructions(lowered) == [
        *("conv_relu_op,0", "conv_relu_op,1", "sin_op,2", "cos_op,3", "div_op,4")
    ]


def test_the_three_identifiers_of_tan_map_to_its_handle(lowered: LoweredBackendModule) -> None:
    handles = lowered.meta["debug_handle_map"]
    assert [len(handles[one]) for one in (0, 1)] == [2, 2]
    assert handles[2] == handles[3] == handles[4]
    assert len(handles[2]) == 1


def test_own_identifiers_name_the_nodes() -> None:
    model, inputs = BackendWithDelegateMappingDemo.get_test_model_and_inputs()
    partitioner = DelegateMappingDemoPartitioner([OWN_IDENTIFIERS])
    (delegate,) = delegates(lower(model, inputs, partitioner))
    names = list(delegate.meta["debug_handle_map"])
    assert names[0] == "conv2d+relu/conv_relu_op"
    assert names[2:] == ["tan/sin_op", "tan/cos_op", "tan/div_op"]
    torch.testing.assert_close(
        run(delegate, RUNTIME, inputs)[0], model(*inputs).detach(), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("decomposed", [False, True])
def test_a_convolution_with_two_readers_stays_alone(decomposed: bool) -> None:
    conv = nn.Conv2d(3, 4, 3, stride=2, dilation=2, padding=(1, 2), bias=False)
    model = nn.Sequential(conv, Of(lambda y: torch.relu(y) + y))
    x = torch.randn(2, 3, 17, 12)
    program = exported(model, x)
    if decomposed:
        program = program.run_decompositions()
    lowered = to_backend(program, DelegateMappingDemoPartitioner())
    (delegate,) = delegates(lowered)
    assert instructions(delegate) == ["conv_op,0", "relu_op,1"]
    y = conv(x).detach()
    for output in run(delegate, RUNTIME, [x]):
        assert any(torch.allclose(output, one, atol=1e-5) for one in (y, torch.relu(y)))


def test_a_lone_convolution_and_a_lone_relu_are_taken_around_a_batch_norm() -> None:
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1))
    model, x = nn.Sequential(*layers).eval(), torch.randn(2, 3, 8, 8)
    program = lower(model, (x,), DelegateMappingDemoPartitioner())
    assert [instructions(one) for one in delegates(program)] == [
        *(["conv_op,0"], ["relu_op,0", "conv_op,1"])
    ]
    torch.testing.assert_close(program.module()(x), model(x))


def test_an_unsupported_operator_is_refused_with_its_node_and_source_line() -> None:
    program = exported(Of(lambda x: torch.cumsum(torch.relu(x), 0)), torch.ones(3))
    with pytest.raises(
        UnsupportedOperatorError, match=r"aten\.cumsum\.default.*'cumsum'.*\.py:\d+"
    ):
        BackendWithDelegateMappingDemo.preprocess(program, [])
    # Core ATen has one operator for convolutions and transposed ones.
    transposed = exported(nn.ConvTranspose2d(2, 2, 2), torch.randn(1, 2, 3, 3))
    program = transposed.run_decompositions()
    assert not delegates(to_backend(program, DelegateMappingDemoPartitioner()))
    with pytest.raises(UnsupportedOperatorError, match="transposed"):
        BackendWithDelegateMappingDemo.preprocess(program, [])


# ------------------------------------------------------------------------------- damaged blobs


def signed(body: str) -> bytes:
    return sealed("BackendWithDelegateMappingDemo", body)


def test_every_step_is_logged_by_the_identifiers_of_the_debug_map(
    lowered: LoweredBackendModule,
) -> None:
    logged: list[object] = []
    handle = RUNTIME.init(memoryview(lowered.processed_bytes), [], named_data(lowered))

    def log(identifier: object, start: int, end: int, outputs: tuple[torch.Tensor, ...]) -> None:
        assert start <= end
        logged.append((identifier, tuple(outputs[0].shape)))

    RUNTIME.execute_logged(handle, [torch.ones(1, 3, 8, 8)], log)
    assert logged == [
        (identifier, (1, channels, 8, 8))
        for identifier, channels in zip(
            lowered.meta["debug_handle_map"], (16, 32, 32, 32, 32), strict=True
        )
    ]


def test_another_version_is_refused_by_number(lowered: LoweredBackendModule) -> None:
    blob = lowered.processed_bytes.replace(b"Demo 2 ", b"Demo 1 ", 1)
    with pytest.raises(BlobError, match=r"Demo 1 .*expected b'\w+Demo 2 "):
        RUNTIME.init(memoryview(blob), [], named_data(lowered))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_truncated_changed_or_forged_blob_is_refused_or_runs_within_bounds(
    lowered: LoweredBackendModule, data: st.DataObject
) -> None:
    blob = lowered.processed_bytes
    kind = data.draw(st.sampled_from(["truncated", "changed", "forged"]))
    at = data.draw(st.integers(0, len(blob) - 1))
    if kind == "truncated":
        damaged = blob[:at]
    elif kind == "changed":
        damaged = blob[:at] + bytes([blob[at] ^ data.draw(st.integers(1, 255))]) + blob[at + 1 :]
    else:
        body = blob.partition(b"\n")[2].decode()
        at %= len(body)
        junk = data.draw(st.text("0123456789x%@#[]-.,\n ", max_size=6))
        damaged = signed(body[:at] + junk + body[at + data.draw(st.integers(0, 6)) :])
    try:
        run_blob(damaged, RUNTIME, named_data(lowered), [torch.ones(1, 3, 8, 8)])
    except (BlobError, DelegateRunError):
        return  # any other error fails the test
    assert kind == "forged"


def test_a_weight_of_another_size_is_refused(lowered: LoweredBackendModule) -> None:
    data = {key: value[:-4] for key, value in named_data(lowered).items()}
    with pytest.raises(BlobError, match="bytes"):
        RUNTIME.init(memoryview(lowered.processed_bytes), [], data)


def test_wrong_inputs_are_refused_by_position(lowered: LoweredBackendModule) -> None:
    handle = RUNTIME.init(memoryview(lowered.processed_bytes), [], named_data(lowered))
    with pytest.raises(DelegateInputError, match="found 0 inputs, expected 1"):
        RUNTIME.execute(handle, [])
    with pytest.raises(DelegateInputError, match=r"input 0: found .*, expected float32"):
        RUNTIME.execute(handle, [torch.ones(1, 3, 8, 8, dtype=torch.float64)])
    with pytest.raises(DelegateRunError, match=r"conv_relu_op \(debug identifier 0\)"):
        RUNTIME.execute(handle, [torch.ones(1, 5, 8, 8)])
