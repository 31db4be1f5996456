"""Lower models, run their files in the official runtime and compare them with eager."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import get_lowered_backend_modules, to_backend
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import assert_close, official

Inputs = tuple[Tensor, ...]


def file_of(
    model: nn.Module | ExportedProgram,
    inputs: Inputs = (),
    partitioner: Any = None,
    *,
    decomposed: bool = False,
    **options: Any,
) -> bytes:
    """Return the file of a model that XNNPACK, or another partitioner's backend, computes.

    Args:
        model: A module to export, or a program.
        inputs: Example inputs of a module.
        partitioner: XNNPACK's by default.
        decomposed: Whether torch decomposes the program before.
        options: Options of the export.
    """
    if isinstance(model, nn.Module):
        model = torch.export.export(model.eval(), inputs, **options)
    program = model.run_decompositions() if decomposed else model
    return emit(to_backend(program, partitioner or XnnpackPartitioner())).to_bytes()


def run(file: bytes, calls: Sequence[Inputs], folder: Path | None = None) -> list[list[Any]]:
    """Return the outputs of each call, of the file in a folder if there is one.

    From a path the runtime frees weights that it copied, which bytes hide.
    """
    source: bytes | Path = file
    if folder is not None:
        source = folder / "model.pte"
        source.write_bytes(file)
    return official.outputs(source, calls)


def check(
    model: nn.Module,
    *calls: Inputs,
    folder: Path | None = None,
    tolerance: float = 2e-5,
    partitioner: Any = None,
    decomposed: bool = False,
    **options: Any,
) -> None:
    """Lower a model for its first inputs, and compare all calls with eager.

    Args:
        model: The model.
        calls: Inputs.
        folder: Where to write the file; None runs bytes.
        tolerance: Absolute and relative.
        partitioner: XNNPACK's by default.
        decomposed: Whether torch decomposes the program before.
        options: Options of the export.
    """
    file = file_of(model, calls[0], partitioner, decomposed=decomposed, **options)
    for found, given in zip(run(file, calls, folder), calls, strict=True):
        with torch.no_grad():
            assert_close(found, model(*given), atol=tolerance, rtol=tolerance)


def delegates(program: ExportedProgram) -> list[Any]:
    """Return the delegates of a lowered program."""
    return list(get_lowered_backend_modules(program.graph_module))


def assert_whole(program: ExportedProgram) -> Any:
    """Return the one delegate of a program, outside of which nothing computes."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    names = [str(node.target) for node in calls if node.target is not operator.getitem]
    others = [name for name in names if "sym_size" not in name]
    assert others == ["executorch_call_delegate"], others
    return delegates(program)[0]
