"""Every demo keeps what lowering promises, by the kit that any backend author can use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.export import Dim

from lowerdeck import demo_backends
from lowerdeck.lowered_module.testing import Sample, check_backend, generated
from lowerdeck_zoo import Holding
from lowerdeck_zoo.executor_backend import ExecutorPartitioner, ExecutorRuntime

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning")


class Sized(Holding, total=lambda: torch.zeros(4)):
    """Computes with a size that only a call knows, and changes a buffer."""

    def forward(self, x: torch.Tensor) -> Any:
        self.total.add_(x.sum(0))
        return torch.relu(x + x.shape[0]) + torch.tan(x) * self.total


BATCH = {"x": {0: Dim("batch", min=2, max=9)}}
SAMPLES = (
    Sample("sized", Sized().eval(), (torch.linspace(-1, 1, 12).reshape(3, 4),), BATCH),
    generated(1, 6, dynamic=True),
    generated(2, 6),
)
BACKENDS: dict[str, tuple[Any, Any]] = {
    "BackendWithDelegateMappingDemo": (
        demo_backends.DelegateMappingDemoPartitioner,
        demo_backends.DelegateMappingDemoRuntime,
    ),
    "BackendWithStateDemo": (demo_backends.StateDemoPartitioner, demo_backends.StateDemoRuntime),
    "ExecutorBackend": (ExecutorPartitioner, ExecutorRuntime),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_passes_the_conformance_kit(backend: str) -> None:
    partitioner, runtime = BACKENDS[backend]
    report = check_backend(partitioner(), samples=SAMPLES, runtimes={backend: runtime()})
    assert report.passed, str(report)
