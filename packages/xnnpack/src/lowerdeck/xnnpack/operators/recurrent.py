"""Unrolled LSTM and GRU layers: XNNPACK has no loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.fx import Node
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnOperator
from lowerdeck.xnnpack.emit import Call, Emission, Tracked, fits_half, is_fixed, joined
from lowerdeck.xnnpack.operators.contract import Operator, Table
from lowerdeck.xnnpack.operators.normalization import weighted_sums
from lowerdeck.xnnpack.payload import HALF

_aten = torch.ops.aten
_MOST_STEPS = 1000


class _Cell(NamedTuple):
    """One layer in one direction.

    Attributes:
        batch: The number of sequences.
        width: The size of a state.
        recurrent: Weight of the state, one row per output.
        shift: Bias of the product of weight and state, or None.
    """

    emission: Emission
    batch: Dim
    width: int
    recurrent: torch.Tensor
    shift: torch.Tensor | None

    def part(self, gates: Tracked, number: int) -> Tracked:
        """Return the slice of one gate."""
        return self.emission.sliced(gates, 1, number * self.width, self.width)

    def product(self, state: Tracked | None) -> Tracked | None:
        """Return the contribution of a state to the gates; None for a zero state."""
        if state is None:
            return None
        return _layer(self.emission, state, self.recurrent, self.shift)

    def plus(self, gates: Tracked, other: Tracked | None) -> Tracked:
        """Return a sum; None counts as 0."""
        if other is None:
            return gates
        return self.emission.binary(XnnOperator.ADD, gates, other, shape=gates.shape)


_States = tuple[Tracked | None, ...]
_Step = Callable[[_Cell, Tracked, _States], tuple[Tracked, ...]]
"""Maps a cell, the input's contribution to the gates, and states (None for zeros) to new states.
"""


def _layer(
    emission: Emission, tensor: Tracked, weight: torch.Tensor, bias: torch.Tensor | None
) -> Tracked:
    encoding = HALF if emission.half_weights and fits_half(weight) else emission.writes
    return weighted_sums(emission, tensor, weight, bias, encoding)


def _lstm(cell: _Cell, share: Tracked, states: _States) -> tuple[Tracked, ...]:
    e, (hidden, memory) = cell.emission, states
    gates = cell.plus(share, cell.product(hidden))
    enter, forget, leave = (
        e.unary(XnnOperator.SIGMOID, cell.part(gates, number)) for number in (0, 1, 3)
    )
    new = e.binary(XnnOperator.MULTIPLY, enter, e.unary(XnnOperator.TANH, cell.part(gates, 2)))
    if memory is not None:
        new = e.binary(XnnOperator.ADD, e.binary(XnnOperator.MULTIPLY, forget, memory), new)
    return e.binary(XnnOperator.MULTIPLY, leave, e.unary(XnnOperator.TANH, new)), new


def _gru(cell: _Cell, share: Tracked, states: _States) -> tuple[Tracked, ...]:
    e, (hidden,) = cell.emission, states
    product = cell.product(hidden)

    def of_state(number: int) -> Tracked | None:
        if product is not None:
            return cell.part(product, number)
        if cell.shift is None:
            return None
        first = number * cell.width
        shift = cell.shift[None, first : first + cell.width]
        return Tracked.of(shift)

    reset, update = (
        e.unary(XnnOperator.SIGMOID, cell.plus(cell.part(share, number), of_state(number)))
        for number in (0, 1)
    )
    kept = of_state(2)
    if kept is not None:
        kept = e.binary(XnnOperator.MULTIPLY, reset, kept)
    new = e.unary(XnnOperator.TANH, cell.plus(cell.part(share, 2), kept))
    moved = (
        e.unary(XnnOperator.NEGATE, new)
        if hidden is None
        else e.binary(XnnOperator.SUBTRACT, hidden, new)
    )
    return (e.binary(XnnOperator.ADD, e.binary(XnnOperator.MULTIPLY, moved, update), new),)


def _emitter(step: _Step, *, merges: bool) -> Callable[[Emission, Call], None]:
    """Return the emitter of a recurrent layer.

    Args:
        step: Emits one step of a cell.
        merges: Whether the biases of input and state can be merged.
    """

    def emit(emission: Emission, call: Call) -> None:
        args = call.args
        source = emission.plain(emission.of(args["input"]))
        if args["batch_first"]:
            source = emission.transposed(source, (1, 0, 2))
        batch = source.shape[1]
        states = [emission.of(state) for state in _hidden(call)]
        many = 4 if args["has_biases"] else 2
        last: list[list[Tracked]] = [[] for _ in states]
        directions = 2 if args["bidirectional"] else 1
        for layer in range(int(args["num_layers"])):
            ways = []
            for way in range(directions):
                number = layer * directions + way
                nodes = args["params"][number * many : (number + 1) * many]
                weights = _merged([emission.constant(node) for node in nodes], merges=merges)
                cell = _Cell(emission, batch, int(weights[1].shape[1]), weights[1], weights[3])
                shares = _layer(emission, source, weights[0], weights[2])
                first = tuple(_state(emission, state, number) for state in states)
                outputs, ends = _run(cell, step, shares, first, backwards=way == 1)
                ways.append(outputs)
                for kept, end in zip(last, ends, strict=True):
                    kept.append(end)
            source = joined(emission, ways, 2)
        if args["batch_first"]:
            source = emission.transposed(source, (1, 0, 2))
        _define(emission, call.node, source, last)

    return emit


def _merged(
    weights: Sequence[torch.Tensor | None], *, merges: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the weights of the inputs and states of one cell, and their biases."""
    inputs, states, *shifts = weights
    assert inputs is not None
    assert states is not None
    shift, state_shift = shifts or (None, None)
    if merges and state_shift is not None:
        # A zero state is skipped, but its bias must not be.
        shift, state_shift = state_shift if shift is None else shift + state_shift, None
    return inputs, states, shift, state_shift


def _hidden(call: Call) -> list[Node]:
    hidden = call.args["hx"]
    return list(hidden) if isinstance(hidden, (list, tuple)) else [hidden]


def _state(emission: Emission, states: Tracked, number: int) -> Tracked | None:
    """Return the initial state of one cell, None for zeros."""
    if states.tensor is not None and not bool(states.tensor[number].any()):
        return None
    return emission.view(emission.sliced(states, 0, number, 1), states.shape[1:])


def _run(
    cell: _Cell, step: _Step, shares: Tracked, states: _States, *, backwards: bool
) -> tuple[Tracked, tuple[Tracked, ...]]:
    """Return the hidden states of all steps as one tensor, and the final states."""
    emission, (steps, *share) = cell.emission, shares.shape
    outputs: list[Tracked] = []
    ends: tuple[Tracked, ...] = ()
    for number in range(int(steps))[:: -1 if backwards else 1]:
        gates = emission.view(emission.sliced(shares, 0, number, 1), share)
        states = ends = step(cell, gates, states)
        outputs.append(emission.view(ends[0], (1, cell.batch, cell.width)))
    return joined(emission, outputs[::-1] if backwards else outputs, 0), ends


def _define(
    emission: Emission, node: Node, result: Tracked, last: Sequence[Sequence[Tracked]]
) -> None:
    for user in node.users:
        number = int(user.args[1])  # type: ignore[arg-type]  # the index of a getitem
        if number:
            ends = [emission.view(state, (1, *state.shape)) for state in last[number - 1]]
            emission.define(user, joined(emission, ends, 0))
        else:
            emission.define(user, result)


def _refusal(call: Call) -> str | None:
    args = call.args
    many = (4 if args["has_biases"] else 2) * (2 if args["bidirectional"] else 1)
    if args["train"] and args["dropout"]:
        return "it applies dropout"
    if call.rank("input") != 3:
        return "its input needs 3 dimensions"
    if len(args["params"]) != many * args["num_layers"]:
        return "its states are projected"
    if not all(isinstance(state, Node) for state in _hidden(call)) or not all(
        weight.name in call.constants for weight in args["params"]
    ):
        return "its weights are not constant"
    steps = call.shape("input")[1 if args["batch_first"] else 0]
    if not is_fixed(steps) or not 0 < steps <= _MOST_STEPS:
        return f"it takes a symbolic number of steps, or more than {_MOST_STEPS}"
    return None


RECURRENT: Table = {
    _aten.lstm.input: Operator(_emitter(_lstm, merges=True), _refusal),
    _aten.gru.input: Operator(_emitter(_gru, merges=False), _refusal),
}
