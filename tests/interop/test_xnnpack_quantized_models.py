"""Whole models, quantised as their users do it today, in the official runtime.

PT2E needs an annotator, for which ExecuTorch's is taken as a peer; both it and torchao are
optional here.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.runner import load
from lowerdeck.serializer import XnnDatatype, decode_payload, verify_pte
from lowerdeck.xnnpack import XnnpackPartitioner
from tests.interop.runs import assert_whole, run

from quantized_models import (  # isort: skip
    ANNOTATOR,
    QUANTIZE,
    model_and_inputs,
    with_pt2e,
)


def _peers_are_here() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(QUANTIZE)
            importlib.import_module(ANNOTATOR)
        except ImportError:
            return False
    return True


pytestmark = pytest.mark.skipif(
    not _peers_are_here(), reason="needs torchao and ExecuTorch's annotator"
)
Tensor = torch.Tensor
MODELS = ("cnn", "mlp", "decoder", "mobilenet")


def outputs_of(
    program: ExportedProgram, inputs: tuple[Tensor, ...], folder: Path, **options: Any
) -> tuple[Tensor, set[XnnDatatype], dict[str, str]]:
    """Return what the official runtime gives, from a path and from bytes, and what it is made of.

    Our own runtime must give nearly the same.
    """
    partitioner = XnnpackPartitioner(**options)
    lowered = to_backend(program, partitioner)
    payload = decode_payload(assert_whole(lowered).processed_bytes)
    file = emit(lowered).to_bytes()
    verify_pte(file)
    found = [run(file, [inputs], where)[0][0] for where in (folder, None)]
    assert torch.equal(*found)
    ours = load(file).run("forward", *inputs)
    ours = ours[0] if isinstance(ours, (tuple, list)) else ours
    tolerance = 0.01 if found[0].dtype != torch.bfloat16 else 0.03
    torch.testing.assert_close(ours, found[0], rtol=tolerance, atol=tolerance)
    return found[0], {value.dtype for value in payload.values}, partitioner.in_float


def last_step(program: ExportedProgram) -> float:
    """Return the scale of a program's last rounding."""
    names = [node for node in program.graph.nodes if "dequantize_per_tensor" in str(node.target)]
    return float(names[-1].args[1])


# torch divides attention into operators that XNNPACK lacks.
FORMS = [*((name, False) for name in MODELS), ("cnn", True), ("mobilenet", True)]


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("name", "decomposed"), FORMS)
def test_static_integers_equal_the_quantised_program_to_two_steps(
    name: str, decomposed: bool, per_channel: bool, tmp_path: Path
) -> None:
    model, inputs = model_and_inputs(name)
    program = with_pt2e(model, inputs, is_per_channel=per_channel)
    wanted = program.module()(*inputs)
    program = program.run_decompositions() if decomposed else program
    found, kinds, in_float = outputs_of(program, inputs, tmp_path)
    assert XnnDatatype.QINT8 in kinds
    assert bool(in_float) == (name == "decoder"), in_float
    # Each layer may round a tie another way; what that does to the last is seldom over a step.
    assert float((found - wanted).abs().max()) <= 2.001 * last_step(program)


@pytest.mark.parametrize(("name", "decomposed"), FORMS)
def test_inputs_quantised_at_run_time_by_pt2e(name: str, decomposed: bool, tmp_path: Path) -> None:
    model, inputs = model_and_inputs(name)
    with torch.no_grad():
        wanted = model(*inputs)
    program = with_pt2e(model, inputs, is_per_channel=True, is_dynamic=True)
    # The runtime rounds row by row, finer than the program says: no worse against float32.
    error = float((program.module()(*inputs) - wanted).abs().max())
    program = program.run_decompositions() if decomposed else program
    found, kinds, in_float = outputs_of(program, inputs, tmp_path)
    assert XnnDatatype.QDINT8 in kinds
    assert not in_float
    assert float((found - wanted).abs().max()) <= 1.5 * error + 1e-3


@pytest.mark.parametrize(
    ("dtype", "precision", "tolerance"),
    [
        (torch.float16, None, 4e-3),
        (torch.float16, "fp32", 4e-3),
        (torch.bfloat16, None, 4e-2),
        (torch.float32, "fp16", 2e-3),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_halves_equal_float32_to_their_precision(
    name: str, dtype: torch.dtype, precision: str | None, tolerance: float, tmp_path: Path
) -> None:
    model, inputs = model_and_inputs(name)
    with torch.no_grad():
        wanted = model(*inputs)
    given = tuple(one.to(dtype) for one in inputs)
    program = torch.export.export(model.to(dtype), given)
    found, kinds, _ = outputs_of(program, given, tmp_path, precision=precision)
    assert kinds & {XnnDatatype.FP16, XnnDatatype.BF16}
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=tolerance)
