"""Programs with test cases: ``.bpte`` files made from calls, and tried in this runner."""

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
        expected: For each method what computes the results, such as the eager model. Those of a
            method without one are computed here by the program: such cases tell whether a device
            computes the same as this runner, not whether the program does what the model did.
        data: The ``.ptd`` beside the program.
        backends: Runtime halves of backends by id, before the installed ones.

    Raises:
        ProgramError: The program cannot be loaded.
        InputError: Inputs do not fit, or an input or a result is of a kind that such files do not
            hold: they hold tensors, whole numbers, truth values and floats.
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
        made = []
        for number, args in enumerate(calls):
            # Each case begins with the state of a program that was just loaded.
            method = loaded.clone().method(name)
            inputs = method.signature.flatten(tuple(args), {})
            where = f"{name}: test case {number}"
            # Before the call, which may write to them.
            given = [_bundled(one, f"{where}, input {i}") for i, one in enumerate(inputs)]
            results = method.run_flat(inputs)
            if name in computed:
                results = _expected(computed[name], args, results, where)
            wanted = [_bundled(one, f"{where}, result {i}") for i, one in enumerate(results)]
            made.append(MethodTestCase(given, wanted))
        suites.append(MethodTestSuite(name, made))
    return BundledProgram(content, suites)


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """What came of one test case.

    Attributes:
        method: The method.
        number: Which of its test cases, from 0.
        differences: The largest absolute difference of each result; infinite where shape or type
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
    """Return what comes of the test cases of a bundled program in this runner.

    Args:
        bundle: The program, or the bytes of a ``.bpte`` file.
        data: The ``.ptd`` beside it.
        backends: Runtime halves of backends by id, before the installed ones.
        rtol: The part of an expected number by which a result may differ.
        atol: By how much it may differ besides; both are what ExecuTorch's tools take.

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
            found = method.run_flat([_plain(value) for value in case.inputs])
            wanted = [_plain(value) for value in case.expected_outputs]
            if len(found) != len(wanted):
                raise InputError(
                    f"{suite.method_name}: test case {number} expects {len(wanted)} results; the "
                    f"method has {len(found)}"
                )
            pairs = [_compared(*pair, rtol, atol) for pair in zip(found, wanted, strict=True)]
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
    compute: Callable[..., Any], args: Sequence[Any], found: Sequence[Any], where: str
) -> list[Any]:
    """Return what should come of a call; it must look like what the program gives."""
    results = leaves(compute(*args))
    for index, (one, wanted) in enumerate(zip(found, results, strict=False)):
        if isinstance(one, torch.Tensor) and not _alike(one, wanted):
            raise InputError(
                f"{where}: expected of result {index} is {_described(wanted)}; the program gives "
                f"{_described(one)}"
            )
    if len(results) != len(found):
        raise InputError(
            f"{where}: {len(results)} results are expected; the program gives {len(found)}"
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
                raise InputError(f"{value.scalar_type!r} is no type that the runner computes with")
            strides = strides_of(value.sizes, value.dim_order)
            content = bytearray(as_view(value.data))
            if not content:
                return torch.empty(0, dtype=dtype).as_strided(value.sizes, strides)
            return torch.frombuffer(content, dtype=dtype).as_strided(value.sizes, strides)


def _compared(found: Any, wanted: Any, rtol: float, atol: float) -> tuple[float, bool]:
    if not isinstance(found, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        if isinstance(found, torch.Tensor) or isinstance(wanted, torch.Tensor) or found is None:
            return float("inf"), False
        found, wanted = torch.tensor(found), torch.tensor(wanted)
    if not _alike(found, wanted):
        return float("inf"), False
    kind = torch.complex128 if found.dtype.is_complex else torch.float64
    one, other = found.to(kind), wanted.to(kind)
    close = torch.isclose(one, other, rtol=rtol, atol=atol, equal_nan=True)
    apart = (one - other).abs()
    apart[(one == other) | (one.isnan() & other.isnan())] = 0
    apart[apart.isnan()] = float("inf")
    return float(apart.max()) if apart.numel() else 0.0, bool(close.all())
