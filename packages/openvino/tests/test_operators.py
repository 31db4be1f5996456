"""Each operator, compiled by OpenVINO and run by our runtime half, agrees with torch."""

from __future__ import annotations

import pytest
import torch
from openvino_cases import CASES, Calls, Case  # type: ignore[import-not-found]

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import get_non_lowered_nodes, to_backend
from lowerdeck.openvino import OpenvinoBackend, OpenvinoPartitioner
from lowerdeck.runner import load
from lowerdeck.torch_base import pytree


def lowered_whole(case: Case) -> bytes:
    """Return a file in which OpenVINO computes everything."""
    program = torch.export.export(Calls(case.function), case.inputs)
    partitioner = OpenvinoPartitioner()
    lowered = to_backend(program, partitioner)
    left = [node for node in get_non_lowered_nodes(lowered.graph) if "getitem" not in node.name]
    assert not left, f"{left}: {partitioner.refused}"
    return emit(lowered).to_bytes()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_torch(case: Case) -> None:
    found = load(lowered_whole(case)).run("forward", *case.inputs)
    torch.testing.assert_close(
        found, Calls(case.function)(*case.inputs), rtol=1e-5, atol=2e-5, equal_nan=True
    )


def halves(case: Case) -> Case | None:
    """Return a case in float16, or None where it has no floats, or wants them as they are."""
    if not any(one.dtype == torch.float32 for one in case.inputs) or "quantized" in case.operator:
        return None
    inputs = tuple(one.half() if one.dtype == torch.float32 else one for one in case.inputs)
    try:
        case.function(*inputs)
    except RuntimeError:  # torch has no such kernel
        return None
    return Case(case.operator, case.function, inputs)


@pytest.mark.parametrize("case", [half for one in CASES if (half := halves(one))], ids=str)
def test_agrees_with_torch_in_half_precision(case: Case) -> None:
    found = pytree.tree_leaves(load(lowered_whole(case)).run("forward", *case.inputs))
    # OpenVINO computes in float32, torch some of it in float16: what is exact is the judge.
    exact = [one.float() if one.dtype == torch.float16 else one for one in case.inputs]
    wanted = pytree.tree_leaves(Calls(case.function)(*exact))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            one.to(other.dtype), other, rtol=2e-3, atol=2e-3, equal_nan=True
        )


def test_every_operator_of_the_table_has_a_case() -> None:
    assert {case.operator for case in CASES} == set(OpenvinoBackend.supported_operators())
