"""Bundle a program with test cases."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lowerdeck.runner.delegates import BackendRuntime
from lowerdeck.runner.errors import InputError
from lowerdeck.runner.loading import Beside, Source, load
from lowerdeck.serializer import (
    Bool,
    BundledProgram,
    BundledTensor,
    BundledValue,
    Double,
    Int,
    MethodTestCase,
    MethodTestSuite,
    Program,
    ScalarType,
    serialize_pte,
)
from lowerdeck.torch_base import SCALAR_TYPES, bytes_of, pytree


def make_bundle(
    program: Source,
    cases: Mapping[str, Sequence[Sequence[Any]]],
    expected: Mapping[str, Callable[..., Any]] | None = None,
    *,
    data: Beside = None,
    backends: Mapping[str, BackendRuntime] | None = None,
) -> BundledProgram:
    """Return a bundled program for ``lowerdeck.serializer.write_bundle``.

    Args:
        program: The ``.pte`` file, its bytes, or the program itself.
        cases: For each method, the argument tuple of each test case.
        expected: For each method, a function that returns the expected results, such as the eager
            model. By default this runner computes the results: cases then compare a device with
            this runner, not with the model.
        data: The ``.ptd`` file of the program.
        backends: Runtimes of backends by id; they take precedence over installed ones.

    Raises:
        ProgramError: The program cannot be loaded.
        InputError: Inputs or expected results do not match the method, or an input or result is
            not a tensor of a supported dtype, int, bool or float.
        ExecutionError: A call failed.

    Example:
        >>> from lowerdeck.serializer import Chain, ExecutionPlan, Program
        >>> program = Program(execution_plan=[ExecutionPlan("forward", chains=[Chain()])])
        >>> bundle = make_bundle(program, {"forward": [()]})
        >>> bundle.method_test_suites[0].method_name
        'forward'
    """
    content = _bytes_of(program)
    loaded = load(content, data=data, backends=backends)
    computed = dict(expected or {})
    suites = []
    for name, calls in cases.items():
        test_cases = []
        for number, args in enumerate(calls):
            # Each case starts from the initial state.
            method = loaded.clone().method(name)
            inputs = method.signature.flatten(tuple(args), {})
            where = f"{name}: test case {number}"
            # Bundle inputs before the call mutates them.
            inputs_before = [
                _bundled(value, f"{where}, input {i}") for i, value in enumerate(inputs)
            ]
            results = method.run_flat(inputs)
            if name in computed:
                count, results = len(results), pytree.tree_leaves(computed[name](*args))
                if len(results) != count:
                    raise InputError(
                        f"{where}: the function in expected returns {len(results)} results, the "
                        f"program {count}"
                    )
            expected_results = [
                _bundled(value, f"{where}, result {i}") for i, value in enumerate(results)
            ]
            test_cases.append(MethodTestCase(inputs_before, expected_results))
        suites.append(MethodTestSuite(name, test_cases))
    return BundledProgram(content, suites)


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
            f"{where} is a {getattr(value, 'dtype', type(value).__name__)}; bundles hold "
            "only ints, bools, floats and tensors of the dtypes of a .pte file"
        )
    value = value.detach().cpu()
    order = value.dim_order()
    if not value.permute(order).is_contiguous():
        value, order = value.contiguous(), tuple(range(value.dim()))
    dense = value.permute(order).contiguous()
    return BundledTensor(
        ScalarType(SCALAR_TYPES[value.dtype]),
        list(value.shape),
        list(order),
        bytes(bytes_of(dense)),
    )
