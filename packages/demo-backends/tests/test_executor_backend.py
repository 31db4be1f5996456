"""Programs inside programs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from demo_lowering import delegates, lower, run
from torch import nn

from lowerdeck.emitter import emit
from lowerdeck.runner import load
from lowerdeck_zoo import Holding
from lowerdeck_zoo.executor_backend import ExecutorPartitioner, ExecutorRuntime

# torch's own, from copying a tree spec inside run_decompositions
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning")


class Small(Holding, layers=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))):
    """Two layers and two outputs."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layers(x)
        return y, torch.softmax(y, -1)


X = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.mark.parametrize(
    "inside",
    [
        (),
        ("XnnpackBackend",),
        ("ExecutorBackend",),
        ("ExecutorBackend", "ExecutorBackend", "XnnpackBackend"),
    ],
)
def test_a_program_in_a_program_equals_eager_at_any_depth(inside: Sequence[str]) -> None:
    torch.manual_seed(0)
    model = Small().eval()
    lowered = lower(model, (X,), ExecutorPartitioner(inside))
    (delegate,) = delegates(lowered)
    assert delegate.processed_bytes.count(b"ET12") == 1 + sum(
        one == "ExecutorBackend" for one in inside
    )
    with torch.no_grad():
        expected = model(X)
    program = load(emit(lowered).to_bytes(), backends={"ExecutorBackend": ExecutorRuntime()})
    for found, right in zip(program.run("forward", X), expected, strict=True):
        torch.testing.assert_close(found, right)
    for found, right in zip(run(delegate, ExecutorRuntime(), [X]), expected, strict=True):
        torch.testing.assert_close(found, right)


def test_damaged_files_wrong_inputs_and_bottomless_nesting_are_refused() -> None:
    (delegate,) = delegates(lower(Small(), (X,), ExecutorPartitioner()))
    runtime, blob = ExecutorRuntime(), delegate.processed_bytes
    for damaged in (b"", blob[:40], blob[: len(blob) // 2], blob.replace(b"ET12", b"ET99")):
        with pytest.raises(ValueError, match="nested file"):
            runtime.init(memoryview(damaged), [], {})
    with pytest.raises(ValueError, match="16 deep"):
        ExecutorRuntime(depth=16).init(memoryview(blob), [], {})
    handle = runtime.init(memoryview(blob), [], {})
    with pytest.raises(ValueError, match="1 inputs are needed, found 2"):
        runtime.execute(handle, [X, X])
    with pytest.raises(RuntimeError, match="nested program"):
        runtime.execute(handle, [X[:1, :2]])
