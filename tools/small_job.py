"""A small model through all packages that are installed, with eager as the judge of each step."""

from __future__ import annotations

import warnings

import torch

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import find_partitioner, to_backend
from lowerdeck.runner import load
from lowerdeck.serializer import verify_pte
from lowerdeck.unflatten import unflatten

BACKENDS = ("BackendWithDelegateMappingDemo", "ExecutorBackend", "XnnpackBackend")


def main() -> None:
    """Unflatten a program; lower it to each backend, write, verify and run it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    x = torch.randn(3, 4)
    program = torch.export.export(model.eval(), (x,))
    expected = model(x)
    unflattened = unflatten(program)
    assert [name for name, _ in unflattened.named_children()] == ["0", "1", "2"]
    torch.testing.assert_close(unflattened(x), expected)
    for backend in BACKENDS:
        lowered = to_backend(program, find_partitioner(backend))
        delegates = [m for m in lowered.graph_module.modules() if hasattr(m, "processed_bytes")]
        assert {delegate.backend_id for delegate in delegates} == {backend}, backend
        file = emit(lowered).to_bytes()
        verify_pte(file)
        torch.testing.assert_close(load(file).run("forward", x), expected)


if __name__ == "__main__":
    # Old packages beside new ones may say what is deprecated; that is not asked here.
    warnings.simplefilter("ignore")
    main()
