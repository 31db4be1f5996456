"""Compare a program with eager, and locate the first operator that differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from lowerdeck.runner.comparison.following import ReferenceRun
from lowerdeck.runner.comparison.pairing import EagerOp, pair_last_events, record_nodes, tensors_of
from lowerdeck.runner.comparison.quanta import Expected, expected_of
from lowerdeck.runner.debug_info import SourceLocation
from lowerdeck.runner.errors import InputError
from lowerdeck.runner.profile import Event
from lowerdeck.runner.program import LoadedProgram
from lowerdeck.torch_base import pytree


@dataclass(frozen=True, slots=True)
class Difference:
    """Result that differs from eager's.

    Attributes:
        instruction: Index of the instruction, or -1 for an output of the method.
        name: The called operator, or ``output 0``.
        place: Source location; unknown parts are empty.
        eager_name: Name of the corresponding operator in eager, or "".
        largest: The largest absolute difference; infinite if the shapes differ, or if only one of
            two numbers is NaN.
        label: Operator in a delegate, such as ``Conv2d``, if the backend's runtime reports it.
    """

    instruction: int
    name: str
    place: SourceLocation
    eager_name: str
    found: torch.Tensor
    expected: torch.Tensor
    largest: float
    label: str = ""

    def __str__(self) -> str:
        where = "; ".join(filter(None, (self.place.module_path, self.place.source_line)))
        start = (
            f"instruction {self.instruction} ({self.name}{' ' + self.label if self.label else ''})"
            if self.instruction >= 0
            else self.name
        )
        return (
            f"{start} differs from eager's {self.eager_name or 'result'} by up to "
            f"{self.largest:.4g}{' at ' + where if where else ''}"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a comparison with eager.

    Attributes:
        differences: Differing results, in the order of the program; outputs come last.
        compared: Number of compared results.
        unmatched: Events of the program without a counterpart in eager.
    """

    differences: tuple[Difference, ...]
    compared: int
    unmatched: tuple[Event, ...]

    @property
    def first(self) -> Difference | None:
        """Return the first difference, or None if there is none."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        summary = (
            f"{self.compared} results of lowerdeck.runner compared, "
            f"{len(self.unmatched)} without a counterpart"
        )
        if self.first is None:
            return f"equal to eager ({summary})"
        return f"{self.first} ({summary}, {len(self.differences)} differ)"


def compare(
    program: LoadedProgram,
    eager_model: torch.nn.Module | ExportedProgram,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    method: str = "forward",
    rtol: float = 1e-4,
    atol: float = 1e-4,
) -> Comparison:
    """Return the differences between a program and its source model.

    Both run on copies of the inputs; each instruction's result is compared with that of its node
    in the exported program. Results without a node, such as parts of a decomposition, are listed
    as unmatched; so are all instructions of a program loaded without ``debug=``.

    Results of 8-bit delegates may differ from eager by one quantization step, and must saturate at
    eager's limits. In programs with low-precision delegates, each operator is compared with eager
    on the program's own inputs, so that upstream rounding is not attributed to it.

    Args:
        program: Its mutable state advances by one call.
        eager_model: The exported program that was emitted, or a module, which is exported.
        inputs: Positional inputs of the model.
        kwargs: Keyword inputs of the model.

    Raises:
        InputError: The model and the method return different numbers of results or different
            constants, or an argument has the wrong type.
        ExecutionError: An instruction failed.

    Example:
        >>> comparison = compare(load("model.pte"), model, (x,))  # doctest: +SKIP
        >>> print(comparison.first)  # doctest: +SKIP
        instruction 17 (aten::linear.out) differs from eager's aten::linear by up to 0.25 ...
    """
    if not isinstance(inputs, list | tuple):
        raise InputError(
            f"found a {type(inputs).__name__} as inputs; expected a tuple, as in (x,)"
        )
    keywords = kwargs or {}
    # The program runs on copies, so that neither sees mutations of the other's inputs.
    copies = [_copied(value) for value in inputs]
    kwarg_copies = {name: _copied(value) for name, value in keywords.items()}
    profile = program.method(method).profile(*copies, **kwarg_copies)
    used: list[Event] = []
    expected_values: dict[str, list[Expected]] = {}
    exported = (
        eager_model
        if isinstance(eager_model, ExportedProgram)
        else torch.export.export(eager_model, tuple(map(_copied, inputs)), dict(keywords))
    )
    expected, ops = record_nodes(exported, list(map(_copied, inputs)), keywords)
    pairs = pair_last_events(profile.events, ops)
    if any(event.precision is not None for event in profile.events) and pairs:
        reference = ReferenceRun(
            exported,
            profile.events,
            pairs,
            lambda found, right: _distance(found, right, rtol, atol) is None,
        )
        reference.run(list(map(_copied, inputs)), keywords)
        expected_values, expected, used = reference.expected, reference.outputs, reference.used
    differences, compared = [], 0
    for event, op in pairs:
        for result, right in _values(event, op, expected_values.get(op.node)):
            compared += 1
            largest = _distance(result, right, rtol, atol)
            if largest is not None:
                differences.append(
                    Difference(
                        *(event.instruction, event.name, event.place, op.name, result),
                        *(_in_shape_of(result, right.value), largest, event.label),
                    )
                )
    compared += len(pytree.tree_leaves(profile.result))
    differences += _outputs(profile.result, expected, rtol, atol)
    matched = {id(event) for event, _ in pairs} | set(map(id, used))
    unmatched = tuple(e for e in profile.events if id(e) not in matched and tensors_of(e.values))
    return Comparison(tuple(differences), compared, unmatched)


# The emitter subtracts the mean before these kernels and adds it to the mean that they return, so
# their second result differs from eager's.
_CENTERED = ("native_layer_norm", "native_group_norm", "_native_batch_norm_legit")


def _values(
    event: Event, op: EagerOp, expected: Sequence[Expected] | None = None
) -> list[tuple[torch.Tensor, Expected]]:
    """Return pairs of an event's and eager's results."""
    if expected is None:
        expected = [expected_of(event, value) for value in op.values]
    values = list(zip(tensors_of(event.values), expected, strict=False))
    if event.name.partition("::")[2].partition(".")[0] in _CENTERED:
        del values[1:2]
    return values


def _in_shape_of(result: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return ``value``, reshaped like ``result`` if they have equally many elements."""
    if result.shape == value.shape or result.numel() != value.numel():
        return value
    return value.reshape(result.shape)


def _distance(result: torch.Tensor, right: Expected, rtol: float, atol: float) -> float | None:
    """Return the largest absolute difference if it exceeds the tolerance, else None."""
    expected = _in_shape_of(result, right.value)
    if result.shape != expected.shape:
        return float("inf")
    if result.numel() == 0:
        return None
    wide = torch.complex128 if result.is_complex() else torch.float64
    left, reference = result.to(wide), expected.to(wide)
    if torch.allclose(left, reference, rtol=rtol, atol=atol + right.slack, equal_nan=True):
        return None
    difference = (left - reference).abs()
    return float(torch.where(difference.isnan(), float("inf"), difference).max())


def _outputs(actual: Any, expected: Any, rtol: float, atol: float) -> list[Difference]:
    ours, theirs = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    if len(ours) != len(theirs):
        raise InputError(f"the method returns {len(ours)} results, the model {len(theirs)}")
    differences = []
    for number, (result, reference) in enumerate(zip(ours, theirs, strict=True)):
        if result is None or isinstance(result, str):  # a constant, which has no error
            if result != reference:
                raise InputError(f"output {number} is {result!r}, the model returns {reference!r}")
            continue
        left, right = torch.as_tensor(result), torch.as_tensor(reference)
        largest = _distance(left, Expected(right.detach()), rtol, atol)
        if largest is not None:
            differences.append(
                Difference(-1, f"output {number}", SourceLocation(), "", left, right, largest)
            )
    return differences


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value
