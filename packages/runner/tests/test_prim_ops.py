"""Scalar operators: names, arities, and where the runtime is not like Python."""

from typing import Any

import pytest

from lowerdeck.runner.operators.kernels import ScalarKernel, find_kernel
from lowerdeck.runner.operators.prim_ops import in_range


def result(name: str, *values: Any) -> Any:
    kernel = find_kernel(*name.split("."))
    assert isinstance(kernel, ScalarKernel)
    assert kernel.arity == len(values)
    return kernel.call(*values)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("executorch_prim::mod.Scalar", (-7, 2), -1),
        ("executorch_prim::mod.Scalar", (7, -2), 1),
        ("executorch_prim::mod.int", (7, 3), 1),
        ("executorch_prim::floordiv.Scalar", (-7, 2), -4),
        ("executorch_prim::floordiv.int", (-7, 2), -3),
        ("executorch_prim::floordiv.int", (-7, -2), 3),
        ("executorch_prim::truediv.Scalar", (1, 2), 0.5),
        ("executorch_prim::round.Scalar", (2.5,), 2),
        ("executorch_prim::sym_not.Scalar", (True,), False),
        ("executorch_prim::sym_ite.Scalar", (False, 1, 2), 2),
        ("executorch_prim::sym_max.Scalar", (1, 2), 2),
        ("executorch_prim::trunc.Scalar", (-1.5,), -1),
    ],
)
def test_results(name: str, values: tuple[Any, ...], expected: Any) -> None:
    found = result(name, *values)
    assert found == expected
    assert type(found) is type(expected)


def test_integers_beyond_64_bits_are_refused() -> None:
    assert in_range(2**63 - 1) == 2**63 - 1
    assert in_range(1e300) == 1e300
    with pytest.raises(OverflowError, match="does not fit in 64 bits"):
        in_range(2**63)
