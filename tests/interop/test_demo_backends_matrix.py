"""Every demo backend, on every model, in every runtime that has it, with eager as the judge."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowerdeck.demo_backends import (
    BackendWithDelegateMappingDemo,
    CompilerDemoPartitioner,
    DelegateMappingDemoPartitioner,
    ExecutorPartitioner,
    InductorPartitioner,
    InductorRuntime,
    SharedWeightsDemoPartitioner,
)
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.runner import load

# torch's own, from copying a tree spec inside run_decompositions
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning")


def shallow_vit() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    """Return a vision transformer of two blocks: all operators of the deep one, in less time."""
    torch.manual_seed(16)
    model = importlib.import_module("examples.vit").VisionTransformer(depth=2, classes=10)
    return model.eval(), (torch.randn(1, 3, 224, 224),)


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, tuple[Any, ...]]]] = {
    "conv_relu_tan": BackendWithDelegateMappingDemo.get_test_model_and_inputs,
    "resnet18": lambda: importlib.import_module("examples.resnet18").example(),
    "mobilenet_v2": lambda: importlib.import_module("examples.mobilenet_v2").example(),
    "vit": shallow_vit,
}
PARTITIONERS: dict[str, Callable[[], Any]] = {
    "BackendWithDelegateMappingDemo": DelegateMappingDemoPartitioner,
    "BackendWithCompilerDemo": CompilerDemoPartitioner,
    "BackendWithSharedWeightsDemo": SharedWeightsDemoPartitioner,
    "ExecutorBackend": ExecutorPartitioner,
    "ExecutorBackend of XnnpackBackend": lambda: ExecutorPartitioner(["XnnpackBackend"]),
}
# The one model that XNNPACK cannot take whole, and so cannot be nested whole.
UNSUITED = {("ExecutorBackend of XnnpackBackend", "conv_relu_tan")}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", PARTITIONERS)
def test_the_runner_equals_eager(backend: str, model: str) -> None:
    if (backend, model) in UNSUITED:
        pytest.skip("XNNPACK has no tangent, so that it cannot take the whole partition")
    module, inputs = MODELS[model]()
    program = to_backend(torch.export.export(module, inputs), PARTITIONERS[backend]())
    found = load(emit(program).to_bytes()).run("forward", *inputs)
    with torch.no_grad():
        torch.testing.assert_close(found, module(*inputs), rtol=0, atol=1e-4)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own parts
@pytest.mark.parametrize("model", MODELS)
def test_native_code_equals_eager(model: str) -> None:
    module, inputs = MODELS[model]()
    program = to_backend(torch.export.export(module, inputs), InductorPartitioner())
    runtimes = {"InductorBackend": InductorRuntime(allow_native_code=True)}
    found = load(emit(program).to_bytes(), backends=runtimes).run("forward", *inputs)
    with torch.no_grad():
        torch.testing.assert_close(found, module(*inputs), rtol=0, atol=1e-4)
