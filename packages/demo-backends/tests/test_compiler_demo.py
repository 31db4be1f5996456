"""The backend that takes operators one by one and is told how by compile specs."""

from __future__ import annotations

import pytest
import torch
from demo_lowering import delegates, lower, run
from torch import nn

from lowerdeck.demo_backends import (
    BackendWithCompilerDemo,
    BlobError,
    CompilerDemoPartitioner,
    CompilerDemoRuntime,
    DelegateInputError,
    UnsupportedNodeError,
)
from lowerdeck.lowered_module import CompileSpec, LoweredBackendModule
from lowerdeck.serializer import CompileSpec as StoredSpec
from lowerdeck_zoo import Holding

RUNTIME = CompilerDemoRuntime()


class Mixed(Holding, weight=lambda: nn.Parameter(torch.arange(12.0).reshape(3, 4) / 10)):
    """Two operators that the backend has around one that it lacks, and a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.mm(x, self.weight)).abs() * 0.5 + 1


X = torch.linspace(-1, 1, 6).reshape(2, 3)


@pytest.fixture(scope="module")
def lowered() -> list[LoweredBackendModule]:
    return delegates(lower(Mixed(), (X,), CompilerDemoPartitioner()))


def test_each_operator_is_a_delegate_and_together_they_equal_eager(
    lowered: list[LoweredBackendModule],
) -> None:
    steps = [one.processed_bytes.decode().splitlines()[2].split(" ")[0] for one in lowered]
    assert steps == ["aten.mm.default", "aten.sin.default", "aten.mul.Tensor", "aten.add.Tensor"]
    value = X
    for delegate in lowered:
        (value,) = run(delegate, RUNTIME, [value if delegate is not lowered[2] else value.abs()])
    torch.testing.assert_close(value, Mixed()(X).detach())


def test_max_value_travels_with_the_delegate(lowered: list[LoweredBackendModule]) -> None:
    spec = lowered[1].compile_specs[0]
    assert (spec.key, spec.value) == ("max_value", b"1048576")
    stored = [StoredSpec("max_value", b"4")]
    handle = RUNTIME.init(memoryview(lowered[1].processed_bytes), stored, {})
    with pytest.raises(DelegateInputError, match="8 elements, max_value is 4"):
        RUNTIME.execute(handle, [torch.ones(2, 4)])


def test_what_is_larger_than_max_value_is_left_out() -> None:
    assert len(delegates(lower(Mixed(), (X,), CompilerDemoPartitioner(max_value=8)))) == 3


def test_an_unsupported_operator_and_a_large_tensor_are_refused() -> None:
    program = torch.export.export(Mixed(), (X,))
    with pytest.raises(UnsupportedNodeError, match=r"aten\.abs\.default.*'abs_1'.*\.py:\d+"):
        BackendWithCompilerDemo.preprocess(program, [])
    with pytest.raises(UnsupportedNodeError, match="max_value is 7"):
        BackendWithCompilerDemo.preprocess(program, [CompileSpec("max_value", b"7")])
    with pytest.raises(BlobError, match="must be a number"):
        BackendWithCompilerDemo.preprocess(program, [CompileSpec("max_value", b"many")])
