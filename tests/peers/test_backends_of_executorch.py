"""Partitioners and backends written for ExecuTorch serve programs that never saw its `to_edge`."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch

exir = pytest.importorskip("executorch.exir", reason="executorch with its dependencies is needed")

from executorch.exir._serialize._named_data_store import NamedDataStore as PeerNamedDataStore  # noqa: E402
from executorch.exir.backend.backend_details import BackendDetails as PeerBackendDetails  # noqa: E402
from executorch.exir.backend.backend_details import PreprocessResult as PeerPreprocessResult  # noqa: E402
from executorch.exir.backend.compile_spec_schema import CompileSpec as PeerCompileSpec  # noqa: E402
from executorch.exir.backend.partitioner import DelegationSpec as PeerDelegationSpec  # noqa: E402
from executorch.exir.backend.partitioner import Partitioner as PeerPartitioner  # noqa: E402
from executorch.exir.backend.partitioner import PartitionResult as PeerPartitionResult  # noqa: E402
from executorch.exir.backend.utils import tag_constant_data  # noqa: E402
from executorch.exir.dialects._ops import ops as exir_ops  # noqa: E402

from lowerdeck.exir_compat import EdgeCompileConfig, EdgeProgramManager, to_edge  # noqa: E402
from lowerdeck.lowered_module import (  # noqa: E402
    LoweredBackendModule,
    PreprocessError,
    get_lowered_backend_modules,
    lower,
    to_backend,
)
from lowerdeck.lowered_module.testing import RunPartitioner  # noqa: E402
from lowerdeck.runner import load  # noqa: E402
from lowerdeck.serializer import deserialize_pte  # noqa: E402
from lowerdeck_zoo import official, program  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

# Else programs are in the Edge dialect here, which has been imported.
IN_TORCHS = EdgeCompileConfig(_use_edge_ops=False)
UNCHECKED = exir.EdgeCompileConfig(_check_ir_validity=False)
DEMOS = "executorch.exir.backend.test."
PARTITIONERS = [
    (f"{DEMOS}op_partitioner_demo", "AddMulPartitionerDemo"),
    (f"{DEMOS}op_partitioner_demo", "AddAttributePartitionerDemo"),
    (f"{DEMOS}op_partitioner_demo", "AllNodesPartitionerDemo"),
    (f"{DEMOS}op_partitioner_demo", "NonDecompTestPartitioner"),
    (f"{DEMOS}hta_partitioner_demo", "HTAPartitionerMultiplePatternsDemo"),
    (f"{DEMOS}hta_partitioner_demo", "HTAPartitionerOnePatternDemo"),
    (f"{DEMOS}backend_with_named_data_map", "BackendWithNDMPartitioner"),
    (f"{DEMOS}backend_with_preprocess_all_demo", "BackendWithPreprocessAllPartitioner"),
    (f"{DEMOS}demos.rpc.executor_backend_partitioner", "ExecutorBackendPartitioner"),
    ("executorch.backends.example.example_partitioner", "ExamplePartitioner"),
]
# Where exir's own lowering fails and ours does not.
PEER_FAILS = {
    ("AddAttributePartitionerDemo", "State"),
    ("BackendWithPreprocessAllPartitioner", "State"),
    ("ExamplePartitioner", "Products"),
    ("ExamplePartitioner", "State"),
}


THREE = tuple(torch.ones(2, 2) for _ in range(3))


class Products(torch.nn.Module):
    def forward(self, a, x, b):
        z = (torch.mm(a, x) + b - b) * 2 + 1
        return torch.mm(a, z) + b + torch.sin(z)


class Constants(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.constant = torch.ones(2, 2)
        self.register_buffer("held", torch.full((2, 2), 3.0))
        self.weight = torch.nn.Parameter(torch.ones(2, 2))

    def forward(self, a, x, b):
        sums = torch.mm(a, x) + self.constant + self.held.sin() - self.weight.cos()
        return sums + (x + self.held) * self.weight


class Gates(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, a, x, b):
        return (
            torch.tanh(torch.sigmoid(self.linear(a)) * torch.tanh(self.linear(x))).cos() + b.sin()
        )


class State(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("total", torch.zeros(2, 2))

    def forward(self, a, x, b):
        y = torch.mm(a, self.linear(x)) + b
        self.total.add_(y)
        return (y * self.total).sin()


def found(module, name):
    """Return a class of the wheel, whose dependencies may be missing here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(pytest.importorskip(module, exc_type=ImportError), name)


def delegates(program):
    return get_lowered_backend_modules(program.graph_module)


@pytest.mark.parametrize("model", [Products, Constants, Gates, State])
@pytest.mark.parametrize(("module", "name"), PARTITIONERS, ids=[name for _, name in PARTITIONERS])
def test_the_demos_give_the_same_delegates_as_in_exir(model, module, name):
    torch.manual_seed(0)
    partitioner, eager = found(module, name), model()
    x = tuple(torch.randn(2, 2) for _ in range(3))
    exported = torch.export.export(eager, x)
    manager = to_edge(exported, compile_config=IN_TORCHS).to_backend(partitioner())
    lowered = manager.exported_program()
    lowered.validate()
    assert lowered.dialect == "ATEN"
    module = lowered.module()
    for _ in range(2):
        torch.testing.assert_close(module(*x), eager(*x), atol=1e-5, rtol=1e-5)
    ours = [one.backend_id for one in delegates(lowered)]
    peers = exir.to_edge(exported, compile_config=UNCHECKED)
    if (name, model.__name__) in PEER_FAILS:
        with pytest.raises(Exception):  # noqa: B017, PT011  (each fails in its own way)
            peers.to_backend(partitioner())
        return
    lowered = peers.to_backend(partitioner()).exported_program()
    from executorch.exir.lowered_backend_module import get_lowered_backend_modules as of_peer

    assert ours == [one.backend_id for one in of_peer(lowered.graph_module)]


BACKENDS = {
    "XNNPACK": ("executorch.backends.xnnpack.partition.xnnpack_partitioner", "XnnpackPartitioner"),
    "Vulkan": ("executorch.backends.vulkan.partitioner.vulkan_partitioner", "VulkanPartitioner"),
    "CoreML": ("executorch.backends.apple.coreml.partition", "CoreMLPartitioner"),
    "MPS": ("executorch.backends.apple.mps.partition", "MPSPartitioner"),
}


# Vulkan takes the convolutions in parts.
@pytest.mark.parametrize(
    ("name", "model"),
    [*((name, "small_mlp") for name in BACKENDS), ("XNNPACK", "small_cnn"), ("MPS", "small_cnn")],
)
def test_backends_of_the_wheel_take_whole_models(name, model):
    partitioner = found(*BACKENDS[name])
    eager, (x,) = program(model).module(), program(model).calls()[0].args
    given = partitioner([]) if name == "MPS" else partitioner()
    lowered = lower(program(model).export(), given)
    (delegate,) = delegates(lowered.programs["forward"])
    assert delegate.processed_bytes
    left = {one.name for one in lowered.program.execution_plan[0].operators}
    assert not left
    with torch.no_grad():
        wanted = eager(x)
        torch.testing.assert_close(lowered.programs["forward"].module()(x), wanted)
    if name == "XNNPACK" and official.available():
        outputs = official.outputs(lowered.buffer, [(x,)])
        torch.testing.assert_close(outputs[0][0], wanted, atol=1e-5, rtol=1e-5)


class Taking(PeerPartitioner):
    """Takes all calls of an operator of the Edge dialect, and names it to its backend."""

    def __init__(self, operator, spec):
        self.operator, self.told = operator, spec

    def partition(self, exported_program):
        tags = {}
        for node in exported_program.graph.nodes:
            if node.target == self.operator:
                node.meta["delegation_tag"] = node.name
                tags[node.name] = PeerDelegationSpec("TellingBackend", [self.told])
        tag_constant_data(exported_program)
        return PeerPartitionResult(exported_program, tags)


class TellingBackend(PeerBackendDetails):
    @staticmethod
    def preprocess(edge_program, compile_specs):
        assert edge_program.dialect == "EDGE"
        compile_specs[0].value = b"changed"  # the class is no frozen one, and backends do so
        store = PeerNamedDataStore()
        for name, tensor in {**edge_program.state_dict, **edge_program.constants}.items():
            store.add_named_data(name, tensor.detach())
        if any(n.target == exir_ops.edge.aten.sin.default for n in edge_program.graph.nodes):
            raise RuntimeError("no sine here")
        return PeerPreprocessResult(
            processed_bytes=b"told",
            debug_handle_map={0: (1,)},
            data_store_output=store.get_named_data_store_output(),
            _delegate_info_meta={"seen": len(edge_program.graph.nodes)},
        )


@pytest.mark.parametrize("state", [True, False], ids=["owned state", "passed state"])
def test_to_executorch_accepts_our_lowered_program(state):
    exported = torch.export.export(State().eval(), THREE)
    program = exir.to_edge(exported, compile_config=UNCHECKED).exported_program()
    ours = to_backend(program, RunPartitioner(lambda node: "sin" not in node.name, state=state))
    found = exir.EdgeProgramManager(ours, compile_config=UNCHECKED).to_executorch()
    content = deserialize_pte(bytes(found.buffer))
    names = [delegate.id for delegate in content.execution_plan[0].delegates]
    assert names == ["VerbatimBackend"] * len(delegates(ours))
    blobs = {bytes(memoryview(blob.data)) for blob in content.backend_delegate_data}
    assert blobs == {module.processed_bytes for module in delegates(ours)}
    assert found.delegate_map


def test_delegates_in_the_edge_dialect_are_kept_by_executorch_and_pickle():
    eager = State().eval()
    taking = Taking(exir_ops.edge.aten.add.Tensor, PeerCompileSpec("k", b"v"))
    manager = to_edge(torch.export.export(copy.deepcopy(eager), THREE)).to_backend(taking)
    program = manager.exported_program()
    module = program.module()
    for _ in range(3):
        torch.testing.assert_close(module(*THREE), eager(*THREE))
    assert bytes(exir.EdgeProgramManager(program, compile_config=UNCHECKED).to_executorch().buffer)
    delegate = delegates(program)[0]
    assert delegate.meta["debug_handle_map"] == {0: (1,)}
    # ExecuTorch makes a class for each verifier inside of a function, which pickle cannot name.
    assert delegate.original_module.dialect == "EDGE"
    again = pickle.loads(pickle.dumps(delegate))
    assert type(again) is LoweredBackendModule
    assert again.original_module.dialect == "ATEN"
    assert again.processed_bytes == delegate.processed_bytes
    values = [torch.randn(2, 2) for _ in delegate.original_module.graph_signature.user_inputs]
    for found, expected in zip(again(*values), delegate(*values), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert delegate.original_module.dialect == "EDGE"


def test_results_of_every_form_reach_the_file():
    eager = Constants()
    spec = PeerCompileSpec("k", b"v")
    lowered = lower(torch.export.export(eager, THREE), Taking(exir_ops.edge.aten.mul.Tensor, spec))
    (delegate,) = delegates(lowered.programs["forward"])
    assert delegate.meta["_delegate_info_meta"] == {"seen": 4}
    assert [(one.key, one.value) for one in delegate.compile_specs] == [("k", b"changed")]
    assert bytes(memoryview(delegate.named_data_store_output.buffers[0])) == bytes(
        memoryview(eager.weight.detach().numpy())
    )
    assert lowered.program.execution_plan[0].delegates[0].compile_specs[0].value == b"changed"


def test_what_a_backend_raises_names_the_partition_and_is_a_runtime_error():
    program = torch.export.export(Products(), THREE)
    with pytest.raises(PreprocessError, match="no sine here") as caught:
        lower(program, Taking(exir_ops.edge.aten.sin.default, PeerCompileSpec("k", b"")))
    assert isinstance(caught.value, RuntimeError)


class NamesBackend(PeerBackendDetails):
    """Fails where a program is not of the Edge dialect."""

    @staticmethod
    def preprocess(edge_program, compile_specs):
        assert edge_program.dialect == "EDGE"
        calls = [n for n in edge_program.graph.nodes if n.op == "call_function"]
        assert all(isinstance(n.meta["debug_handle"], int) for n in calls)
        return PeerPreprocessResult(" ".join(n.target.__name__ for n in calls).encode())


@pytest.mark.parametrize("model", [Products, State])
def test_whole_programs_reach_backends_of_exir_in_its_dialect(model):
    eager = model()
    exported = torch.export.export(copy.deepcopy(eager), THREE)
    program = to_edge(exported, compile_config=IN_TORCHS).exported_program()
    lowered = to_backend("NamesBackend", program, [])
    made = exir.to_edge(torch.export.export(copy.deepcopy(eager), THREE)).exported_program()
    peers = exir.backend.backend_api.to_backend("NamesBackend", made, [])
    # exir writes a clone as an operator of dimension orders, and copies state back.
    ours, theirs = (
        [name for name in bytes(one.processed_bytes).decode().split() if name.startswith("aten")]
        for one in (lowered, peers)
    )
    apart = {"aten.copy.default", "aten.clone.default"}
    assert [one for one in ours if one not in apart] == [one for one in theirs if one not in apart]
    assert lowered.original_module.dialect == "ATEN"
    torch.testing.assert_close(lowered(*THREE), eager(*THREE))


def test_programs_of_the_edge_dialect_become_files_under_exirs_names():
    eager = Gates()
    program = exir.to_edge(torch.export.export(eager, THREE)).exported_program()
    before = str(program.graph)
    found = load(EdgeProgramManager(program).to_executorch().buffer).run("forward", *THREE)
    torch.testing.assert_close(found, eager(*THREE))
    assert str(program.graph) == before
    assert program.dialect == "EDGE"


@pytest.mark.parametrize("state", [True, False])
def test_partitions_of_the_edge_dialect_own_their_weights(state):
    exported = torch.export.export(State().eval(), tuple(torch.ones(2, 2) for _ in range(3)))
    edge = exir.to_edge(exported, compile_config=UNCHECKED).exported_program()
    lowered = to_backend(edge, RunPartitioner(lambda node: "sin" not in node.name, state=state))
    (delegate,) = get_lowered_backend_modules(lowered.graph_module)
    owned = {"linear.weight", "linear.bias"} | ({"total"} if state else set())
    assert set(delegate.original_module.state_dict) == owned
    assert set(lowered.state_dict) == {"linear.weight", "linear.bias", "total"} - owned
