"""Each operator, compiled by OpenVINO and run by our runtime, agrees with torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from openvino_cases import CASES, Case  # type: ignore[import-not-found]

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import get_non_lowered_nodes, to_backend
from lowerdeck.openvino import OpenvinoBackend, OpenvinoPartitioner
from lowerdeck.runner import load
from lowerdeck.torch_base import pytree
from lowerdeck_zoo import Of

TOGETHER = 12


def check(cases: list[Case], exact: bool = False, **tolerances: Any) -> None:
    """Compile calls as one program, in which OpenVINO computes everything; compare with torch.

    Args:
        cases: The calls.
        exact: Whether torch computes what is expected in float32.
        tolerances: How near the results must be.
    """
    inputs = tuple(one for case in cases for one in case.inputs)

    def together(*tensors: torch.Tensor) -> list[list[Any]]:
        waiting = iter(tensors)
        arguments = ([next(waiting) for _ in case.inputs] for case in cases)
        results = (case.function(*args) for case, args in zip(cases, arguments, strict=True))
        return [pytree.tree_leaves(one) for one in results]

    partitioner = OpenvinoPartitioner()
    program = to_backend(torch.export.export(Of(together), inputs), partitioner)
    left = [node for node in get_non_lowered_nodes(program.graph) if "getitem" not in node.name]
    assert not left, f"{left}: {partitioner.refused}"
    found = load(emit(program).to_bytes()).run("forward", *inputs)
    wide = [one.float() if exact and one.dtype == torch.float16 else one for one in inputs]
    for case, results, wanted in zip(cases, found, together(*wide), strict=True):
        for one, other in zip(results, wanted, strict=True):
            result = one.to(other.dtype) if exact else one
            name = f"{case.operator}: {{}}".format
            torch.testing.assert_close(result, other, equal_nan=True, msg=name, **tolerances)


def groups(cases: list[Case]) -> Iterator[Any]:
    for first in range(0, len(cases), TOGETHER):
        some = cases[first : first + TOGETHER]
        yield pytest.param(some, id=f"{some[0]} to {some[-1]}")


@pytest.mark.parametrize("cases", list(groups(CASES)))
def test_agrees_with_torch(cases: list[Case]) -> None:
    check(cases, rtol=1e-5, atol=2e-5)


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


@pytest.mark.parametrize("cases", list(groups([x for one in CASES if (x := halves(one))])))
def test_agrees_with_torch_in_half_precision(cases: list[Case]) -> None:
    # OpenVINO computes in float32, torch some of it in float16: what is exact is the judge.
    check(cases, exact=True, rtol=2e-3, atol=2e-3)


def test_every_operator_of_the_table_has_a_case() -> None:
    assert {case.operator for case in CASES} == set(OpenvinoBackend.supported_operators())
