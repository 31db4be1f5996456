"""A key-value cache that lives in the delegate."""

from __future__ import annotations

import pytest
import torch
from demo_lowering import delegates, named_data
from torch.export import ExportedProgram

from lowerdeck.demo_backends import (
    BlobError,
    DelegateInputError,
    DelegateRunError,
    KvCacheAttention,
    StateDemoPartitioner,
    StateDemoRuntime,
)
from lowerdeck.demo_backends.sealed_text import seal
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.runner import load
from lowerdeck.xnnpack import XnnpackPartitioner

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
    state = delegate.processed_bytes.decode().splitlines()[1].split(" ")
    assert [word.rpartition("/")[2] for word in state] == ["state", "8x4", "8x4"]


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
    with pytest.raises(DelegateInputError, match="inputs are needed"):
        runtime.execute(first, step(0)[:2])
    assert all(map(torch.equal, before, first.state))


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["inputs 1"],
        ["state x", "inputs 1", "steps 0", "outputs %0"],
        [f"state {'0' * 64}/float32/1", "inputs 0", "steps 0", "outputs %0"],
    ],
)
def test_a_forged_blob_is_refused(lines: list[str]) -> None:
    with pytest.raises(BlobError):
        StateDemoRuntime().init(memoryview(seal("BackendWithStateDemo", 1, lines)), [], {})


def test_a_buffer_that_is_written_in_place_is_no_constant_to_other_backends() -> None:
    # Straight from torch.export, where the signature does not yet say that it is written.
    program, model = to_backend(exported(), XnnpackPartitioner()), KvCacheAttention()
    runnable = program.module()
    for position in range(3):
        torch.testing.assert_close(runnable(*step(position)), model(*step(position)))
