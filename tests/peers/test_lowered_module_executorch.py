"""What is lowered here is accepted by ExecuTorch, and what is written for it serves here."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

exir = pytest.importorskip("executorch.exir", reason="executorch with its dependencies is needed")

from executorch.exir.backend.backend_details import (  # noqa: E402
    BackendDetails as PeerBackendDetails,
)
from executorch.exir.backend.backend_details import (  # noqa: E402
    PreprocessResult as PeerPreprocessResult,
)
from executorch.exir.backend.compile_spec_schema import (  # noqa: E402
    CompileSpec as PeerCompileSpec,
)
from executorch.exir.backend.partitioner import (  # noqa: E402
    DelegationSpec as PeerDelegationSpec,
)
from executorch.exir.backend.partitioner import Partitioner as PeerPartitioner  # noqa: E402
from executorch.exir.backend.partitioner import (  # noqa: E402
    PartitionResult as PeerPartitionResult,
)

from lowerdeck.exir_compat import to_edge  # noqa: E402
from lowerdeck.lowered_module import (  # noqa: E402
    LoweredBackendModule,
    get_lowered_backend_modules,
    tag_constant_data,
    to_backend,
)
from lowerdeck.lowered_module.testing import RunPartitioner  # noqa: E402
from lowerdeck.serializer import deserialize_pte  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(torch.nn.Module):
    """Weights, a branch, and state that is read and changed."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        y = torch.relu(self.linear(x))
        self.total.add_(y.sum(0))
        return torch.tanh(y) + self.total, self.total.clone()


class PeerBackend(PeerBackendDetails):
    @staticmethod
    def preprocess(edge_program, compile_specs):
        assert isinstance(compile_specs[0], PeerCompileSpec)
        return PeerPreprocessResult(
            processed_bytes=str(edge_program.graph).encode(), debug_handle_map={0: (1, 2)}
        )


class PeerTags(PeerPartitioner):
    def partition(self, exported_program):
        for node in exported_program.graph.nodes:
            if node.op == "call_function" and "tanh" not in str(node.target):
                node.meta["delegation_tag"] = "peer"
            elif node.op == "call_function":
                break
        tag_constant_data(exported_program)
        spec = PeerDelegationSpec("PeerBackend", [PeerCompileSpec("k", b"v")])
        return PeerPartitionResult(exported_program, {"peer": spec})


def edge(module, *inputs):
    with torch.no_grad():
        exported = torch.export.export(module.eval(), inputs)
        return exir.to_edge(
            exported, compile_config=exir.EdgeCompileConfig(_check_ir_validity=False)
        )


def written(program):
    manager = exir.EdgeProgramManager(
        program, compile_config=exir.EdgeCompileConfig(_check_ir_validity=False)
    )
    return manager.to_executorch()


@pytest.mark.parametrize("state", [True, False], ids=["owned state", "passed state"])
def test_to_executorch_accepts_our_lowered_program(state):
    program = edge(Model(), torch.randn(2, 4)).exported_program()
    lowered = to_backend(
        program, RunPartitioner(lambda node: "tanh" not in str(node.target), state=state)
    )
    found = written(lowered)
    content = deserialize_pte(bytes(found.buffer))
    delegates = content.execution_plan[0].delegates
    ours = get_lowered_backend_modules(lowered.graph_module)
    assert [delegate.id for delegate in delegates] == ["VerbatimBackend"] * len(ours)
    blobs = {bytes(memoryview(blob.data)) for blob in content.backend_delegate_data}
    assert blobs == {module.processed_bytes for module in ours}
    assert found.delegate_map


def test_classes_written_for_executorch_serve_unchanged():
    module = Model()
    x = torch.randn(2, 4)
    program = edge(module, x).exported_program()
    lowered = to_backend(program, PeerTags())
    (delegate,) = get_lowered_backend_modules(lowered.graph_module)
    assert delegate.backend_id == "PeerBackend"
    assert delegate.meta["debug_handle_map"] == {0: (1, 2)}
    eager, found = copy.deepcopy(module), lowered.module()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(found(x), eager(x))
    assert bytes(written(lowered).buffer)


def test_delegates_in_the_edge_dialect_pickle():
    module = Model()
    x = torch.randn(2, 4)
    manager = to_edge(torch.export.export(module, (x,))).to_backend(PeerTags())
    (delegate,) = get_lowered_backend_modules(manager.exported_program().graph_module)
    # ExecuTorch makes a class for each verifier inside of a function, which pickle cannot name.
    assert delegate.original_module.dialect == "EDGE"
    again = pickle.loads(pickle.dumps(delegate))
    assert type(again) is LoweredBackendModule
    assert again.original_module.dialect == "ATEN"
    assert again.processed_bytes == delegate.processed_bytes
    values = [
        torch.randn(node.meta["val"].shape)
        for node, spec in zip(
            delegate.original_module.graph.nodes,
            delegate.original_module.graph_signature.input_specs,
            strict=False,
        )
        if spec.kind.name == "USER_INPUT"
    ]
    with torch.no_grad():
        for found, expected in zip(again(*values), delegate(*values), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert delegate.original_module.dialect == "EDGE"
