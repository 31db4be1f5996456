"""Compare calls of a lowered model with calls of the model, including state."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.export import ExportedProgram

from lowerdeck.torch_base import copy_module, pytree, size_range, upper_bound

CALLS = 3
"""Calls of a comparison. An error in the state changes outputs from the second call on."""
_MOST_GROWTH = 64
_LOG = logging.getLogger("lowerdeck.lowered_module")
_Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class OutputAccuracy(NamedTuple):
    """Difference between one output of a lowered model and the model's.

    Attributes:
        largest: Largest absolute difference; infinite if the shapes differ, or where NaN or an
            infinity is compared with another value.
        relative: ``largest`` relative to the largest finite magnitude of the model's output.
        cosine: Cosine of the angle between both, as vectors of their finite elements.
        name: The compared value, such as ``"output 0"`` or ``"state 'cache.keys'"``.
        call: The call with this difference, counted from 1.
    """

    largest: float
    mean: float
    cosine: float
    relative: float
    name: str = ""
    call: int = 1

    def __str__(self) -> str:
        return (
            f"max {self.largest:.3g} (relative {self.relative:.2g}), mean {self.mean:.3g}, "
            f"cosine {self.cosine:.6f}"
        )


class EagerCall(NamedTuple):
    """One call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Any]


def inputs_at_bounds(
    program: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[_Inputs]:
    """Yield inputs of the smallest and of the largest sizes of a program with dynamic sizes.

    Inputs with more than ``_MOST_GROWTH`` times the elements of the example are left out.
    """
    ranges = program.range_constraints
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    names = program.graph_signature.user_inputs
    for bound in (_least, upper_bound) if ranges else ():
        resized = [
            _resize(leaf, [bound(size, ranges) for size in values[name].shape])
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf, name in zip(leaves, names, strict=True)
        ]
        if _elements(resized) <= _MOST_GROWTH * _elements(leaves):
            yield pytree.tree_unflatten(resized, spec)


def _least(size: Any, ranges: Mapping[Any, Any]) -> int:
    return max(1, size_range(size, ranges)[0])


def _elements(leaves: Iterable[Any]) -> int:
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


def _resize(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return a tensor in the same memory format; its elements are repeated or left out."""
    resized = tensor.detach()
    for dim, size in enumerate(sizes):
        resized = resized.index_select(dim, torch.arange(size) % tensor.shape[dim])
    return torch.empty_permuted(sizes, tensor.dim_order(), dtype=tensor.dtype).copy_(resized)


def call_in_eager(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    count: int = CALLS,
    others: Iterable[_Inputs] = (),
) -> tuple[list[EagerCall], dict[str, torch.Tensor]]:
    """Call a copy of a module several times with varied inputs.

    Args:
        module: The model; it is not changed.
        args: Example inputs by position, for the first call.
        kwargs: Example inputs by name.
        count: Number of calls with inputs of the example's sizes.
        others: Inputs of further calls.

    Returns:
        The calls, and the buffers of the copy by name after the last call.

    Raises:
        Exception: The model raised it on the example inputs.
    """
    model = copy_module(module, share_parameters=True)
    calls = []

    def add_call(model: torch.nn.Module, inputs: tuple[Any, Any]) -> None:
        # A model may mutate its inputs, and return them.
        args, kwargs = copy.deepcopy(inputs)
        outputs = copy.deepcopy(pytree.tree_leaves(model(*args, **kwargs)))
        calls.append(EagerCall(*inputs, outputs))

    with torch.no_grad():
        arguments = tuple(args), dict(kwargs)
        varied = (
            pytree.tree_map(lambda leaf, n=number: _vary(leaf, n), arguments)
            for number in range(count)
        )
        for number, inputs in enumerate((*varied, *others)):
            before = copy_module(model, share_parameters=True) if number else model
            try:
                add_call(model, inputs)
            except Exception as error:
                if not number:
                    raise
                if number >= count:
                    _LOG.warning("a size is not compared, because eager rejects it: %s", error)
                # A model may validate its inputs; then it is called with the example inputs again.
                model = before
                add_call(model, copy.deepcopy(arguments))
    return calls, dict(model.named_buffers())


def call_sizes(calls: Iterable[EagerCall]) -> list[str]:
    """Return the sizes of the tensor inputs of calls, each combination once."""
    rows = []
    for call in calls:
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        shapes = [list(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        rows.append(" ".join(dict.fromkeys(map(str, shapes))))
    return list(dict.fromkeys(rows))


def pair_values(
    calls: Sequence[EagerCall],
    run: Callable[..., Any],
    state: Mapping[str, torch.Tensor],
    state_of: Callable[[], Mapping[str, torch.Tensor]],
) -> Iterator[tuple[str, int, Any, Any]]:
    """Yield the name, call number, value and eager value of each output and buffer.

    Args:
        calls: The calls of the model.
        run: Calls the lowered model.
        state: The model's buffers after its last call, by name.
        state_of: Returns the readable state of the lowered model, by name.
    """
    for number, call in enumerate(calls, 1):
        result = run(*copy.deepcopy(call.args), **copy.deepcopy(call.kwargs))
        outputs, _ = pytree.tree_flatten_with_path(result)
        if len(outputs) != len(call.outputs):
            yield "the number of outputs", number, len(outputs), len(call.outputs)
        for position, ((keys, output), expected) in enumerate(
            zip(outputs, call.outputs, strict=False)
        ):
            path = pytree.keystr(keys)
            suffix = "" if path in ("", f"[{position}]") else f" {path}"
            yield f"output {position}{suffix}", number, output, expected
    lowered = state_of() if state else {}
    for name in filter(lowered.__contains__, state):
        yield f"state {name!r}", len(calls), lowered[name], state[name]


def compare_calls(
    calls: Sequence[EagerCall],
    run: Callable[..., Any],
    state: Mapping[str, torch.Tensor],
    state_of: Callable[[], Mapping[str, torch.Tensor]],
) -> tuple[OutputAccuracy, ...]:
    """Return the difference of each output in its worst call, and of each buffer at the end."""
    worst: dict[str, OutputAccuracy] = {}
    for name, number, value, expected in pair_values(calls, run, state, state_of):
        accuracy = _compare_values(value, expected)
        if name not in worst or not accuracy.largest <= worst[name].largest:
            worst[name] = accuracy._replace(name=name, call=number)
    return tuple(worst.values())


def accuracy_of(outputs: Sequence[Any], expected: Sequence[Any]) -> tuple[OutputAccuracy, ...]:
    """Return the difference of each output.

    Args:
        outputs: Outputs of the lowered model.
        expected: Outputs of the model. If their number differs, a single, infinite difference is
            returned.
    """
    if len(outputs) != len(expected):
        return (_NOTHING_ALIKE,)
    return tuple(map(_compare_values, outputs, expected))


_EQUAL = OutputAccuracy(0.0, 0.0, 1.0, 0.0)
_NOTHING_ALIKE = OutputAccuracy(float("inf"), float("inf"), 0.0, float("inf"))


def _compare_values(value: Any, other: Any) -> OutputAccuracy:
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return _EQUAL if type(value) is type(other) and value == other else _NOTHING_ALIKE
    if value.shape != other.shape or value.is_complex() != other.is_complex():
        return _NOTHING_ALIKE
    if not other.numel() or torch.equal(value, other):
        return _EQUAL
    value, other = _as_rows(value), _as_rows(other)
    alike = (value == other) | (value.isnan() & other.isnan())
    parts = (
        (value - other)
        .masked_fill(alike, 0.0)
        .nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    )
    # One column, or the real and the imaginary part.
    difference = parts.norm(dim=1)
    finite = value.isfinite() & other.isfinite()
    cosine = torch.nn.functional.cosine_similarity(value[finite], other[finite], dim=0)
    largest, mean = difference.max(), difference.mean()
    scale = other.nan_to_num(0.0, 0.0, 0.0).abs().max()
    return OutputAccuracy(float(largest), float(mean), float(cosine), float(largest / scale))


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as rows of float64: real numbers, or real and imaginary parts."""
    tensor = tensor.detach().resolve_conj().resolve_neg().flatten()
    if tensor.is_complex():
        return torch.view_as_real(tensor.to(torch.complex128))
    return tensor.to(torch.float64).unsqueeze(1)


def _vary(leaf: Any, number: int) -> Any:
    """Return a tensor with rolled elements; floats are also scaled by ``1 - number / 8``.

    Integers stay in their range.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    varied = leaf.detach().clone()
    if number:
        # Not every dtype has these operators; such an input stays the same.
        with suppress(RuntimeError):
            rolled = leaf.detach().flatten().roll(number).reshape(leaf.shape)
            is_real = leaf.is_floating_point() or leaf.is_complex()
            varied.copy_(rolled * (1 - number / 8) if is_real else rolled)
    return varied
