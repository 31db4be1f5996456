"""Methods that share weights: each is stored once in the file."""

from __future__ import annotations

import pytest
import torch
from demo_lowering import delegates, named_data
from torch import nn

from lowerdeck.demo_backends import (
    BackendWithSharedWeightsDemo,
    BlobError,
    SharedWeightsDemoPartitioner,
    SharedWeightsDemoRuntime,
    UnsupportedNodeError,
)
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import MethodProgramsPartitionerSpec, to_backend
from lowerdeck.runner import load
from lowerdeck_zoo import Of

# torch's own, from copying a tree spec inside run_decompositions
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning")


def headed(encoder: nn.Module, outputs: int) -> Of:
    """Return a module with an encoder that two methods share, and a head of its own."""
    parts = {"encoder": encoder, "head": nn.Linear(64, outputs)}
    return Of(lambda self, x: self.head(torch.relu(self.encoder(x))), **parts)


def test_a_file_of_two_methods_holds_the_shared_weights_once_and_both_equal_eager() -> None:
    torch.manual_seed(0)
    encoder, x = nn.Linear(64, 64), torch.randn(2, 64)
    models = {"classify": headed(encoder, 10), "embed": headed(encoder, 4)}
    lowered = to_backend(
        MethodProgramsPartitionerSpec(
            {name: torch.export.export(model, (x,)) for name, model in models.items()},
            {name: SharedWeightsDemoPartitioner() for name in models},
        )
    )
    assert all(len(delegates(program)) == 1 for program in lowered.values())
    file = emit(lowered).to_bytes()
    weights = {id(p): p.numel() * 4 for model in models.values() for p in model.parameters()}
    assert sum(weights.values()) < len(file) < sum(weights.values()) + 64 * 64 * 4
    program = load(file)
    for name, model in models.items():
        torch.testing.assert_close(program.run(name, x), model(x).detach())


def test_one_store_serves_all_methods() -> None:
    encoder, x = nn.Linear(64, 64), torch.randn(2, 64)
    programs = {
        name: [torch.export.export(headed(encoder, size), (x,))]
        for name, size in (("classify", 10), ("embed", 4))
    }
    results = BackendWithSharedWeightsDemo.preprocess_multimethod(
        programs, {name: [[]] for name in programs}
    )
    for (result,) in results.values():
        assert result.data_store_output is not None
        assert len(result.data_store_output.buffers) == 6


def test_an_unsupported_operator_and_a_damaged_blob_are_refused() -> None:
    program = torch.export.export(nn.Softmax(-1), (torch.ones(2),))
    with pytest.raises(UnsupportedNodeError, match="softmax"):
        BackendWithSharedWeightsDemo.preprocess(program, [])
    lowered = to_backend(
        torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), SharedWeightsDemoPartitioner()
    )
    (delegate,) = delegates(lowered)
    runtime = SharedWeightsDemoRuntime()
    with pytest.raises(BlobError, match="checksum"):
        runtime.init(memoryview(delegate.processed_bytes[:-2]), [], named_data(delegate))
    with pytest.raises(BlobError, match="no entry"):
        runtime.init(memoryview(delegate.processed_bytes), [], {})
