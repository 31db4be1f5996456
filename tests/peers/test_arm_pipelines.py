"""Pipelines of Arm's backends with one import changed: exir's operators and planned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from lowerdeck import exir_compat
from lowerdeck.serializer import DelegateCall, KernelCall, Program, deserialize_pte, open_pte

exir = pytest.importorskip("executorch.exir")
pytest.importorskip("executorch.kernels.quantized")
pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    """Two convolutions, a mean and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3)))


def quantized(quantizer: Any, memory_format: torch.memory_format) -> ExportedProgram:
    torch.manual_seed(0)
    inputs = (torch.randn(1, 3, 16, 16).to(memory_format=memory_format),)
    graph_module = torch.export.export(Net().eval(), inputs).module(check_guards=False)
    prepared = pt2e.prepare_pt2e(graph_module, quantizer)
    prepared(*inputs)
    return torch.export.export(pt2e.convert_pt2e(prepared), inputs)


def calls(program: Program) -> list[str]:
    """Return what the only method calls, in order."""
    (plan,) = program.execution_plan
    names = []
    for instruction in plan.chains[0].instructions:
        call = instruction.instr_args
        if isinstance(call, KernelCall):
            names.append(plan.operators[call.op_index].name)
        elif isinstance(call, DelegateCall):
            names.append(plan.delegates[call.delegate_index].id)
    return names


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_ethos_u_calls_and_plans_what_exir_does(
    memory_format: torch.memory_format, tmp_path: Any
) -> None:
    pytest.importorskip("tosa_serializer")
    ethosu = pytest.importorskip("executorch.backends.arm.ethosu")
    quantizers = pytest.importorskip("executorch.backends.arm.quantizer")
    spec = ethosu.EthosUCompileSpec("ethos-u55-128")
    quantizer = quantizers.EthosUQuantizer(spec)
    quantizer.set_global(quantizers.get_symmetric_quantization_config())
    program = quantized(quantizer, memory_format)
    found = []
    for engine in (exir, exir_compat):
        edge = engine.to_edge_transform_and_lower(
            program,
            partitioner=[ethosu.EthosUPartitioner(spec)],
            compile_config=exir.EdgeCompileConfig(_check_ir_validity=False),
        )
        config = exir.ExecutorchBackendConfig(extract_delegate_segments=False)
        edge.to_executorch(config).save(str(tmp_path / "model.pte"))
        with open_pte(tmp_path / "model.pte") as file:
            made = file.program()
            payloads = [bytes(delegate.data) for delegate in file.delegates]
        found.append((calls(made), made.execution_plan[0].non_const_buffer_sizes, payloads))
    assert found[0] == found[1]
    assert found[0][0][1] == "EthosUBackend"


def test_cortex_m_calls_its_kernels_and_plans_what_exir_does() -> None:
    passes = pytest.importorskip("executorch.backends.cortex_m.passes.cortex_m_pass_manager")
    quantizers = pytest.importorskip("executorch.backends.cortex_m.quantizer.quantizer")
    targets = pytest.importorskip("executorch.backends.cortex_m.target_config")
    target = targets.CortexMTargetConfig(cpu=targets.CortexM.M55)
    program = quantized(quantizers.CortexMQuantizer(), torch.channels_last)
    found = []
    for engine in (exir, exir_compat):
        config = exir.EdgeCompileConfig(
            preserve_ops=[torch.ops.aten.linear.default], _check_ir_validity=False
        )
        edge = engine.to_edge(program, compile_config=config)
        manager = passes.CortexMPassManager(
            edge.exported_program(), passes.CortexMPassManager.pass_list, target_config=target
        )
        # As the backend's own tests do it.
        edge._edge_programs["forward"] = manager.transform()
        made = deserialize_pte(edge.to_executorch().buffer)
        # Ours calls `empty` for scratch memory, and takes a mean in two steps.
        kernels = [name for name in calls(made) if name.startswith("cortex_m::")]
        found.append((kernels, made.execution_plan[0].non_const_buffer_sizes))
    assert found[0] == found[1]
    assert found[0][0].count("cortex_m::quantized_conv2d") == 2
