"""Causal masks: constants of one step a row, computed of two vectors in place of being stored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from lowerdeck.serializer import XnnNode, XnnOperator, XnnValue
from lowerdeck.xnnpack.emit.emission import Emission
from lowerdeck.xnnpack.payload.encoding import FLOAT

_FEWEST = 4096
"""Elements from which on a constant is larger than what computes it."""
_MOST = 1 << 20
"""Elements that are looked at at once."""
_OTHERS = {XnnOperator.COPY}
_LARGEST = float(torch.finfo(torch.float32).max)
_READERS = {XnnOperator.ADD, XnnOperator.SUBTRACT}


class Step(NamedTuple):
    """A matrix that is 0 up to a column that grows with the row, and one number from there on.

    Attributes:
        rows: How many rows there are.
        columns: How many columns there are.
        first: Columns of the first row that are 0.
        number: What the others are; may be -inf.
    """

    rows: int
    columns: int
    first: int
    number: float


def compute_steps(emission: Emission, readers: Mapping[int, set[XnnOperator]]) -> None:
    """Let masks be computed at run time that are steps and are only added, once for all readers.

    A mask of n tokens takes n * n numbers in a file, and two vectors of n when computed.

    Args:
        emission: A payload in which every node is read.
        readers: The kinds of nodes that read each value.
    """
    graph = emission.graph
    added: list[XnnNode] = []
    for value in list(graph.values):
        if value.constant and readers.get(value.id, _OTHERS) <= _READERS:
            found = _step_of(emission, value)
            if found is not None:
                added += _computed(emission, value, found)
                value.constant = None
    if added:
        graph.nodes[:0] = added
        emission.sources[:0] = [()] * len(added)


def _step_of(emission: Emission, value: XnnValue) -> Step | None:
    """Return the step that a constant is, exactly, or None."""
    *outer, rows, columns = (1, 1, *value.shape)
    if value.encoding != FLOAT or rows * columns < _FEWEST or math.prod(outer) != 1:
        return None
    assert value.constant is not None
    data = emission.data[value.constant]

    def lines(start: int, end: int) -> torch.Tensor:
        # Copied, since torch has no tensors of what may only be read.
        piece = bytearray(data[4 * columns * start : 4 * columns * end])
        return torch.frombuffer(piece, dtype=torch.float32).view(-1, columns)

    top = lines(0, 1)[0]
    number, first = float(top[-1]), int((top == 0).sum())
    if not first or number in (0.0, math.inf) or math.isnan(number):
        return None
    each = max(1, _MOST // columns)
    for start in range(0, rows, each):
        part = lines(start, start + each)
        if not torch.equal(part, torch.full(part.shape, number).triu(first + start)):
            return None
    return Step(rows, columns, first, number)


def _computed(emission: Emission, value: XnnValue, step: Step) -> Iterator[XnnNode]:
    """Yield nodes that make a step: columns less rows, between 0 and 1, times the number."""
    ones = (1,) * (len(value.shape) - 2)
    columns = torch.arange(step.columns, dtype=torch.float32).reshape(*ones, 1, -1)
    rows = torch.arange(step.rows, dtype=torch.float32).reshape(*ones, -1, 1) + (step.first - 1)
    with emission.stored(FLOAT, FLOAT):
        made = emission.value_like(value, value.shape)
        yield XnnNode(
            XnnOperator.SUBTRACT,
            {
                "input1_id": emission.constant_value(columns),
                "input2_id": emission.constant_value(rows),
                "output_id": made,
            },
            (0.0, 1.0),
        )
        # No single number is -inf apart from what it makes of 0.
        factors = [step.number] if step.number != -math.inf else [-_LARGEST, 2.0]
        for number, factor in enumerate(factors, 1):
            last = number == len(factors)
            result = value.id if last else emission.value_like(value, value.shape)
            yield XnnNode(
                XnnOperator.MULTIPLY,
                {
                    "input1_id": made,
                    "input2_id": emission.id_of(emission.scalar(factor)),
                    "output_id": result,
                },
            )
            made = result
