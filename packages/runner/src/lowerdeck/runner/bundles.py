"""Programs with test cases: create ``.bpte`` files from calls, and run their cases."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowerdeck.runner._torch_private import leaves
from lowerdeck.runner.delegates import BackendRuntime
from lowerdeck.runner.errors import InputError, ProgramError
from lowerdeck.runner.loading import Beside, Source, load
from lowerdeck.runner.values.layout import dim_order_of, has_layout, strides_of
from lowerdeck.runner.values.sources import as_view
from lowerdeck.serializer import (
    Bool,
    BundledProgram,
    BundledTensor,
    BundledValue,
    Double,
    FormatError,
    Int,
    MethodTestCase,
    MethodTestSuite,
    Program,
    ScalarType,
    deserialize_bundle,
    serialize_pte,
)
from lowerdeck.torch_base import DTYPES, SCALAR_TYPES, bytes_of


def make_bundle(
    program: Source,
    cases: Mapping[str, Sequence[Sequence[Any]]],
    expected: Mapping[str, Callable[..., Any]] | None = None,
    *,
    data: Beside = None,
    backends: Mapping[str, BackendRuntime] | None = None,
) -> BundledProgram:
    """Return a program with test cases, for ``lowerdeck.serializer.write_bundle``.

    Args:
        program: The ``.pte`` file, its bytes, or the program itself.
        cases: For each method the inputs of its calls, each a tuple of arguments.
        expected: For each method a function that computes the results, such as the eager model.
            Without one the results are computed by the program in this runner: such cases
            compare a device with this runner, not with the model.
        data: The ``.ptd`` file of the program.
        backends: Runtime halves of backends by id; they take precedence over installed ones.

    Raises:
        ProgramError: The program cannot be loaded.
        InputError: Inputs do not fit, or an input or a result is not a tensor, an integer, a bool
            or a float, which are all that such files can hold.
        ExecutionError: A call failed.

    Example:
        >>> from lowerdeck.serializer import ExecutionPlan, Program
        >>> program = Program(execution_plan=[ExecutionPlan("forward")])
        >>> bundle = make_bundle(program, {"forward": [()]})
        >>> [outcome.right for outcome in check_bundle(bundle)]
        [True]
    """
    content = _bytes_of(program)
    loaded = load(content, data=data, backends=backends)
    computed = dict(expected or {})
    unknown = [name for name in (*cases, *computed) if name not in loaded.methods]
    if unknown:
        raise ProgramError(
            f"found test cases for {', '.join(unknown)}, expected only methods of the program: "
            f"{', '.join(loaded.methods)}"
        )
    suites = []
    for name, calls in cases.items():
        test_cases = []
        for number, args in enumerate(calls):
            # Each case starts from the initial state.
            method = loaded.clone().method(name)
            inputs = method.signature.flatten(tuple(args), {})
            where = f"{name}: test case {number}"
            # Before the call, which may mutate them.
            inputs_before = [
                _bundled(value, f"{where}, input {i}") for i, value in enumerate(inputs)
            ]
            results = method.run_flat(inputs)
            if name in computed:
                results = _expected(computed[name], args, results, where)
            expected_results = [
                _bundled(value, f"{where}, result {i}") for i, value in enumerate(results)
            ]
            test_cases.append(MethodTestCase(inputs_before, expected_results))
        suites.append(MethodTestSuite(name, test_cases))
    return BundledProgram(content, suites)


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """Outcome of one test case.

    Attributes:
        number: Index of the test case, from 0.
        differences: The largest absolute difference of each result; infinite if shape or type
            differ, or only one of two numbers is NaN.
        right: Whether all results are within the tolerances.
    """

    method: str
    number: int
    differences: tuple[float, ...]
    right: bool


def check_bundle(
    bundle: BundledProgram | bytes | bytearray | memoryview,
    *,
    data: Beside = None,
    backends: Mapping[str, BackendRuntime] | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-8,
) -> list[CaseOutcome]:
    """Return the outcomes of a bundled program's test cases in this runner.

    Args:
        bundle: The program, or the bytes of a ``.bpte`` file.
        data: The ``.ptd`` file of the program.
        backends: Runtime halves of backends by id; they take precedence over installed ones.
        rtol: Relative tolerance; the default is that of ExecuTorch's tools.
        atol: Absolute tolerance, likewise.

    Raises:
        ProgramError: The file or the program is malformed.
        InputError: A test case does not fit its method.
        ExecutionError: A call failed.
    """
    if not isinstance(bundle, BundledProgram):
        try:
            bundle = deserialize_bundle(bundle)
        except FormatError as error:
            raise ProgramError(f"no bundled program: {error}") from error
    loaded = load(as_view(bundle.program), data=data, backends=backends)
    outcomes = []
    for suite in bundle.method_test_suites:
        for number, case in enumerate(suite.test_cases):
            method = loaded.clone().method(suite.method_name)
            if len(case.inputs) != len(method.plan.inputs):
                raise InputError(
                    f"{suite.method_name}: test case {number} has {len(case.inputs)} inputs; the "
                    f"method takes {len(method.plan.inputs)}"
                )
            results = method.run_flat([_plain(value) for value in case.inputs])
            expected = [_plain(value) for value in case.expected_outputs]
            if len(results) != len(expected):
                raise InputError(
                    f"{suite.method_name}: test case {number} expects {len(expected)} results; "
                    f"the method has {len(results)}"
                )
            pairs = [_compared(*pair, rtol, atol) for pair in zip(results, expected, strict=True)]
            outcomes.append(
                CaseOutcome(
                    suite.method_name,
                    number,
                    tuple(difference for difference, _ in pairs),
                    all(close for _, close in pairs),
                )
            )
    return outcomes


def _expected(
    compute: Callable[..., Any], args: Sequence[Any], computed: Sequence[Any], where: str
) -> list[Any]:
    """Return the expected results of a call, which must match the program's in kind."""
    results = leaves(compute(*args))
    for index, (result, expected) in enumerate(zip(computed, results, strict=False)):
        if isinstance(result, torch.Tensor) and not _alike(result, expected):
            raise InputError(
                f"{where}: expected of result {index} is {_described(expected)}; the program "
                f"gives {_described(result)}"
            )
    if len(results) != len(computed):
        raise InputError(
            f"{where}: {len(results)} results are expected; the program gives {len(computed)}"
        )
    return results


def _alike(one: torch.Tensor, other: object) -> bool:
    return (
        isinstance(other, torch.Tensor) and one.shape == other.shape and one.dtype == other.dtype
    )


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def _bytes_of(program: Source) -> bytes:
    if isinstance(program, Program):
        return serialize_pte(program)
    if isinstance(program, str | os.PathLike):
        return Path(program).read_bytes()
    return bytes(program)


def _bundled(value: Any, where: str) -> BundledValue:
    if isinstance(value, bool):
        return Bool(value)
    if isinstance(value, int):
        return Int(value)
    if isinstance(value, float):
        return Double(value)
    if not isinstance(value, torch.Tensor) or value.dtype not in SCALAR_TYPES:
        raise InputError(
            f"{where} is a {getattr(value, 'dtype', type(value).__name__)}; such files hold "
            "tensors, whole numbers, truth values and floats"
        )
    value = value.detach().cpu()
    order = dim_order_of(value)
    if not has_layout(value, order):
        value, order = value.contiguous(), tuple(range(value.dim()))
    dense = value.permute(order).contiguous()
    return BundledTensor(
        ScalarType(SCALAR_TYPES[value.dtype]),
        list(value.shape),
        list(order),
        bytes(bytes_of(dense)),
    )


def _plain(value: BundledValue) -> Any:
    match value:
        case Int(number):
            return number
        case Bool(truth):
            return truth
        case Double(real):
            return real
        case BundledTensor():
            dtype = DTYPES.get(value.scalar_type)
            if dtype is None:
                raise InputError(f"{value.scalar_type!r} is not a type that the runner supports")
            strides = strides_of(value.sizes, value.dim_order)
            content = bytearray(as_view(value.data))
            if not content:
                return torch.empty(0, dtype=dtype).as_strided(value.sizes, strides)
            return torch.frombuffer(content, dtype=dtype).as_strided(value.sizes, strides)


def _compared(result: Any, expected: Any, rtol: float, atol: float) -> tuple[float, bool]:
    if not isinstance(result, torch.Tensor) or not isinstance(expected, torch.Tensor):
        if (
            isinstance(result, torch.Tensor)
            or isinstance(expected, torch.Tensor)
            or result is None
        ):
            return float("inf"), False
        result, expected = torch.tensor(result), torch.tensor(expected)
    if not _alike(result, expected):
        return float("inf"), False
    kind = torch.complex128 if result.dtype.is_complex else torch.float64
    left, right = result.to(kind), expected.to(kind)
    close = torch.isclose(left, right, rtol=rtol, atol=atol, equal_nan=True)
    difference = (left - right).abs()
    difference[(left == right) | (left.isnan() & right.isnan())] = 0
    difference[difference.isnan()] = float("inf")
    return float(difference.max()) if difference.numel() else 0.0, bool(close.all())
