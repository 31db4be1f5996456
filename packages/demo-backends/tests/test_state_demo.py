"""A key-value cache that lives in the delegate."""

from __future__ import annotations

import hashlib

import pytest
import torch
from demo_lowering import delegates, named_data, sealed
from torch.export import ExportedProgram

from lowerdeck.demo_backends import (
    BlobError,
    DelegateInputError,
    DelegateRunError,
    KvCacheAttention,
    StateDemoPartitioner,
    StateDemoRuntime,
)
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.lowered_module.testing import RunPartitioner
from lowerdeck.runner import load

# torch's own, from copying a tree spec inside run_decompositions
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning")


def step(position: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(position)
    rows = [torch.randn(1, 4, generator=generator) for _ in range(3)]
    mask = torch.where(torch.arange(8) <= position, 0.0, -1e9).reshape(1, 8)
    return (*rows, torch.tensor([position]), mask)


def exported() -> ExportedProgram:
    return torch.export.export(KvCacheAttention(), step(0))


@pytest.fixture(scope="module")
def lowered() -> ExportedProgram:
    return to_backend(exported().run_decompositions({}), StateDemoPartitioner())


def test_the_delegate_owns_the_cache(lowered: ExportedProgram) -> None:
    (delegate,) = delegates(lowered)
    assert not lowered.graph_signature.buffers_to_mutate
    assert not lowered.state_dict
    inputs = delegate.processed_bytes.decode().splitlines()[1].split(" ")
    assert [word.rpartition("/")[2] for word in inputs[:3]] == ["inputs", "8x4", "8x4"]
    assert inputs[3:] == ["float32", "float32", "float32", "int64", "float32"]


def test_call_after_call_equals_eager(lowered: ExportedProgram) -> None:
    program, model = load(emit(lowered).to_bytes()), KvCacheAttention()
    for position in range(6):
        torch.testing.assert_close(program.run("forward", *step(position)), model(*step(position)))


def test_each_handle_has_a_state_of_its_own_and_keeps_it_when_a_call_fails(
    lowered: ExportedProgram,
) -> None:
    (delegate,) = delegates(lowered)
    runtime, blob = StateDemoRuntime(), memoryview(delegate.processed_bytes)
    first, second = (runtime.init(blob, [], named_data(delegate)) for _ in range(2))
    runtime.execute(first, step(0))
    assert first.state[0].abs().sum() > 0
    assert second.state[0].abs().sum() == 0
    before = [one.clone() for one in first.state]
    with pytest.raises(DelegateRunError, match="index_copy"):
        runtime.execute(first, [*step(0)[:3], torch.tensor([99]), step(0)[4]])
    with pytest.raises(DelegateInputError, match="inputs, expected"):
        runtime.execute(first, step(0)[:2])
    assert all(map(torch.equal, before, first.state))


STATE = f"@{hashlib.sha256(bytes(4)).hexdigest()}/float32/1"


@pytest.mark.parametrize(
    "body",
    [
        "",
        "inputs float32\n",
        "inputs @x\noutputs %0\n",
        f"inputs {STATE.replace('@', '@0')}\noutputs %0\n",
        f"inputs float32 {STATE}\noutputs %0\n",
        f"inputs {STATE} {STATE}\noutputs %0\n",
    ],
)
def test_a_forged_blob_is_refused(body: str) -> None:
    data = {hashlib.sha256(bytes(4)).hexdigest(): memoryview(bytes(4))}
    blob = memoryview(sealed("BackendWithStateDemo", body))
    with pytest.raises(BlobError):
        StateDemoRuntime().init(blob, [], data)


def test_a_forged_state_that_changes_its_size_is_refused() -> None:
    data = {hashlib.sha256(bytes(4)).hexdigest(): memoryview(bytes(4))}
    body = f"inputs {STATE} float32\noutputs %1\n"
    runtime = StateDemoRuntime()
    handle = runtime.init(memoryview(sealed("BackendWithStateDemo", body)), [], data)
    with pytest.raises(DelegateRunError, match=r"\[1\] became .*\[2\]"):
        runtime.execute(handle, [torch.ones(2)])
    assert runtime.execute(handle, [torch.ones(1)]) == []
    assert handle.state[0].item() == 1


def test_a_buffer_that_is_written_in_place_is_no_constant_to_other_backends() -> None:
    # Straight from torch.export, where the signature does not yet say that it is written.
    program, model = to_backend(exported(), RunPartitioner(lambda node: True)), KvCacheAttention()
    runnable = program.module()
    for position in range(3):
        torch.testing.assert_close(runnable(*step(position)), model(*step(position)))
