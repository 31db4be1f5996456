"""``lowerdeck run --no-emulation`` gives what the official runtime gives, and says so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lowerdeck.demo_backends import BackendWithDelegateMappingDemo, DelegateMappingDemoPartitioner
from lowerdeck.emitter import EmitConfig, emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.serializer import write_pte
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Of


@pytest.mark.parametrize(("delegated", "external"), [(False, True), (True, False)])
def test_results_are_eagers(delegated: bool, external: bool, tmp_path: Path, shell: Any) -> None:
    layers = {"linear": torch.nn.Linear(4, 3)}
    model = Of(lambda self, x: (torch.relu(self.linear(x)), x.shape[0]), **layers).eval()
    x = torch.randn(2, 4)
    program = torch.export.export(model, (x,))
    if delegated:
        program = to_backend(program, XnnpackPartitioner())
    given, out = tmp_path / "x.pt", tmp_path / "out.pt"
    torch.save(x, given)
    file = tmp_path / "model.pte"
    emit(program, config=EmitConfig(weights_file="w" if external else None)).save(file)
    data = ("--data", tmp_path / "w.ptd") if external else ()
    words = ("run", file, "--no-emulation", "--input", given, "--output", out, "--repeat", 2)
    told = shell(*words, *data).out
    found = torch.load(out, weights_only=True)
    torch.testing.assert_close(found[0], model(x)[0])
    assert found[1:] == [2]
    assert re.search(r"\d ms a call in the official ExecuTorch runtime \(\d", told)
    assert "emulates" not in told


def test_a_file_that_is_not_safe_is_not_given_to_the_runtime(tmp_path: Path, shell: Any) -> None:
    program = emit(torch.export.export(torch.nn.ReLU(), (torch.ones(2),))).program
    plan = program.execution_plan[0]
    plan.chains[0].instructions[0].instr_args.args[-1] = 99
    file = tmp_path / "model.pte"
    write_pte(program, file)
    (line,) = shell("run", file, "--no-emulation", status=3).err.splitlines()
    assert line.startswith(f"lowerdeck run: {file}: damaged: ")


def test_what_the_runtime_refuses_is_one_line(tmp_path: Path, shell: Any) -> None:
    model, inputs = BackendWithDelegateMappingDemo.get_test_model_and_inputs()
    lowered = to_backend(torch.export.export(model, inputs), DelegateMappingDemoPartitioner())
    file = tmp_path / "model.pte"
    emit(lowered).save(file)
    assert "in lowerdeck.runner, which emulates the runtime" in shell("run", file).out
    (line,) = shell("run", file, "--no-emulation", status=4).err.splitlines()
    assert line.startswith(f"lowerdeck run: the official runtime failed on {file}: ")
