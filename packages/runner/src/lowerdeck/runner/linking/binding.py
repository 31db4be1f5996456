"""Bind instructions to closures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lowerdeck.runner.errors import ExecutionError, ProgramError
from lowerdeck.runner.instructions import Instruction, Step
from lowerdeck.runner.operators.kernels import (
    VIEW,
    Kernel,
    ScalarKernel,
    TorchKernel,
    ViewKernel,
    accepts,
    converter,
)
from lowerdeck.runner.operators.prim_ops import in_range
from lowerdeck.runner.operators.view_ops import check_shape, resize
from lowerdeck.runner.values.arena import strides_of
from lowerdeck.runner.values.frame import Frame
from lowerdeck.runner.values.tensors import TensorSpec


def bind_kernel(kernel: Kernel, args: Sequence[int], frame: Frame) -> Step:
    """Return a function that runs ``kernel`` on the values ``args``.

    Args:
        args: Value indices of the instruction.

    Raises:
        ProgramError: The arguments do not match the operator.
    """
    for position, index in enumerate(args):
        frame.check(index, f"argument {position} of {kernel.name}")
    if isinstance(kernel, ScalarKernel):
        return _bind_scalar(kernel, args, frame)
    if isinstance(kernel, ViewKernel):
        return _bind_view(kernel, args, frame)
    return _bind_torch(kernel, args, frame)


def effects(kernel: Kernel, args: Sequence[int], frame: Frame) -> Instruction:
    """Return the values that ``kernel`` reads and writes if called with ``args``.

    Args:
        args: Checked value indices of the instruction.
    """
    if isinstance(kernel, ScalarKernel):
        result = tuple(args[kernel.arity : kernel.arity + 1])
        return Instruction(kernel.name, tuple(args[: kernel.arity]), result, result)
    reads: list[int] = []
    writes: list[int] = []
    overwrites: list[int] = []
    in_place: list[int] = []
    if isinstance(kernel, ViewKernel):
        for position, index in enumerate(args[: len(kernel.types)]):
            (writes if position == kernel.written else reads).extend(frame.unfolded(index))
        in_place += reads
        overwrites = writes
    else:
        for position, (argument, index) in enumerate(zip(kernel.arguments, args, strict=False)):
            items = frame.unfolded(index)
            if position in kernel.in_place:
                in_place += items
            if argument.is_written:
                writes += items
            if argument.is_out or (argument.is_written and kernel.name == "aten::copy_"):
                overwrites += items
            else:
                reads += items
    return Instruction(
        kernel.name,
        tuple(reads),
        tuple(writes),
        tuple(overwrites),
        tuple(in_place),
    )


def _check_count(kernel: Kernel, args: Sequence[int], expected: int) -> None:
    if len(args) != expected:
        raise ProgramError(f"{kernel.name} is called with {len(args)} values; it takes {expected}")


def _bind_scalar(kernel: ScalarKernel, args: Sequence[int], frame: Frame) -> Step:
    _check_count(kernel, args, kernel.arity + 1)
    registers, call = frame.registers, kernel.call
    target = args[kernel.arity]
    if kernel.name.startswith("aten::"):
        frame.tensor(args[0], f"argument 0 of {kernel.name}")
    sources = list(args[: kernel.arity])

    def step() -> None:
        registers[target] = in_range(call(*[registers[index] for index in sources]))

    return step


def _bind_view(kernel: ViewKernel, args: Sequence[int], frame: Frame) -> Step:
    _check_count(kernel, args, len(kernel.types) + kernel.returns)
    _, spec = frame.tensor(args[kernel.written], f"the result of {kernel.name}")
    call = kernel.call
    if kernel.name != VIEW:
        # A view only sets a pointer; the others write elements.
        frame.require_writable(spec.index, f"the result of {kernel.name}")
    _check_kinds(kernel.name, kernel.types, args, frame)
    inputs = list(args[: len(kernel.types)])
    fetchers = [frame.fetcher(index) for index in inputs]
    return lambda: call(*[fetch() for fetch in fetchers], spec)


def _bind_torch(kernel: TorchKernel, args: Sequence[int], frame: Frame) -> Step:
    _check_count(kernel, args, len(kernel.arguments) + 1)
    types = [argument.type for argument in kernel.arguments]
    _check_kinds(kernel.name, types, args, frame)
    outs: list[tuple[torch.Tensor, TensorSpec]] = []
    for index in effects(kernel, args, frame).writes:
        outs.append(frame.tensor(index, f"a result of {kernel.name}"))
        frame.require_writable(index, f"a result of {kernel.name}")
    indices = args[: len(kernel.arguments)]
    if any(frame.is_rebound(index) for index in indices):
        return _bind_rebound(kernel, indices, frame)
    positional, keywords = _split(
        kernel, [_converted(t, frame.registers[i]) for t, i in zip(types, indices, strict=True)]
    )
    call = partial(kernel.call, *positional, **keywords)
    if not all(argument.is_out for argument in kernel.arguments if argument.is_written):
        return call  # in-place ops keep the argument's shape
    read_ids = {id(value) for value in _flat(positional)} | {
        id(keywords[a.name]) for a in kernel.arguments if a.keyword_only and not a.is_out
    }
    dynamic = [(out, spec) for out, spec in outs if spec.dynamic]
    if not dynamic:
        return _checked_static(call, outs)
    return _checked_dynamic(call, outs, [out for out, _ in dynamic if id(out) not in read_ids])


def _checked_static(call: Callable[[], Any], outs: list[tuple[torch.Tensor, TensorSpec]]) -> Step:
    def step() -> None:
        call()
        for out, spec in outs:
            if out.shape != spec.sizes:
                _refuse_shape(out, spec)

    return step


def _refuse_shape(out: torch.Tensor, spec: TensorSpec) -> None:
    """Restore the planned shape of a static result for the next call, and raise."""
    shape = out.shape
    out.as_strided_(spec.sizes, strides_of(spec.sizes, spec.dim_order))
    check_shape(shape, spec)


def _checked_dynamic(
    call: Callable[[], Any],
    outs: list[tuple[torch.Tensor, TensorSpec]],
    emptied: list[torch.Tensor],
) -> Step:
    def step() -> None:
        for out in emptied:
            out.resize_(0)  # torch resizes an empty out without a warning
        call()
        for out, spec in outs:
            normalize_layout(out, spec)

    return step


def normalize_layout(out: torch.Tensor, spec: TensorSpec) -> None:
    """Check the shape of ``out`` after a kernel, and convert it to the layout of the file.

    Raises:
        ExecutionError: The shape exceeds the planned one.
    """
    check_shape(out.shape, spec)
    if out.permute(spec.dim_order).is_contiguous():
        return
    elements = out.clone()
    resize(out, elements.shape, spec)
    out.copy_(elements)


def _bind_rebound(kernel: TorchKernel, indices: Sequence[int], frame: Frame) -> Step:
    """Return a step that fetches its arguments per call, because some registers are rebound."""
    fetchers = [
        (frame.fetcher(index), converter(argument.type))
        for index, argument in zip(indices, kernel.arguments, strict=True)
    ]
    written = [
        (frame.fetcher(index), frame.values[index])
        for index, argument in zip(indices, kernel.arguments, strict=True)
        if argument.is_out
    ]

    def step() -> None:
        values = [fetch() if convert is None else convert(fetch()) for fetch, convert in fetchers]
        positional, keywords = _split(kernel, values)
        read_ids = {id(value) for value in _flat(positional)}
        outs = [(out, frame.spec_of[id(out)]) for fetch, _ in written for out in _tensors(fetch())]
        for out, spec in outs:
            if spec.dynamic and id(out) not in read_ids:
                out.resize_(0)
        kernel.call(*positional, **keywords)
        for out, spec in outs:
            normalize_layout(out, spec)

    return step


def _tensors(value: object) -> list[torch.Tensor]:
    tensors = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, torch.Tensor):
            raise ExecutionError(f"a result is bound to a {type(item).__name__}, not a tensor")
        tensors.append(item)
    return tensors


def _check_kinds(name: str, types: Sequence[str], args: Sequence[int], frame: Frame) -> None:
    for position, (type_name, index) in enumerate(zip(types, args, strict=False)):
        value = frame.values[index]
        if index not in frame.rebound and not accepts(type_name, value):
            raise ProgramError(
                f"argument {position} of {name} is value {index}, a {type(value).__name__}; "
                f"expected {type_name}"
            )


def _converted(type_name: str, value: object) -> object:
    convert = converter(type_name)
    if convert is None:
        return value
    try:
        return convert(value)
    except KeyError as error:
        raise ProgramError(f"{value} is not a {type_name} of torch") from error


def _split(kernel: TorchKernel, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    positional, keywords = [], {}
    for argument, value in zip(kernel.arguments, values, strict=True):
        if argument.keyword_only:
            keywords[argument.name] = value
        else:
            positional.append(value)
    return positional, keywords


def _flat(values: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat += value if isinstance(value, list) else [value]
    return flat
