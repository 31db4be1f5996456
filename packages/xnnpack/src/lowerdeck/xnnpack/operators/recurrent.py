"""LSTM, GRU and plain recurrent layers, unrolled (XNNPACK has no loop), and their cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.types import IntLikeType as Dim

from lowerdeck.xnnpack.emit import Call, Emission, Tracked, is_fixed, joined, largest
from lowerdeck.xnnpack.operators.contract import Operator, Table
from lowerdeck.xnnpack.operators.pieces import stretch
from lowerdeck.xnnpack.payload.encoding import HALF
from lowerdeck.xnnpack.payload.layout import Layout
from lowerdeck.xnnpack.payload.schema import NONE, NodeKind

_aten = torch.ops.aten
_MOST_STEPS = 1000
_LARGEST_HALF = float(torch.finfo(torch.float16).max)
_WIDTH = 1


@dataclass(frozen=True, slots=True)
class _Cell:
    """One layer in one direction.

    Attributes:
        emission: Where to add.
        batch: How many sequences run side by side.
        width: How many numbers a state has.
        recurrent: Multiplies the state: rows of outputs.
        shift: Is added to that product; None for nothing.
    """

    emission: Emission
    batch: Dim
    width: int
    recurrent: torch.Tensor
    shift: torch.Tensor | None

    def unary(self, kind: NodeKind, value: int) -> int:
        return self.emission.add(kind, (self.batch, self.width), input_id=value)

    def binary(self, kind: NodeKind, left: int, right: int) -> int:
        shape = (self.batch, self.width)
        return self.emission.add(kind, shape, input1_id=left, input2_id=right)

    def part(self, value: int, number: int) -> int:
        """Return what belongs to one gate."""
        gates = self.emission.tracked((self.batch, len(self.recurrent)), value)
        return self.emission.id_of(
            stretch(self.emission, gates, _WIDTH, number * self.width, self.width)
        )

    def product(self, state: int | None) -> int | None:
        """Return what a state adds to the gates; None for nothing."""
        if state is None:
            return None
        shape = (self.batch, len(self.recurrent))
        return _layer(self.emission, state, shape, self.recurrent, self.shift)


_States = tuple[int | None, ...]
_Step = Callable[[_Cell, int, _States], tuple[int, ...]]
"""From a cell, the gates' share of the input, and states (None for 0) to the next states."""


def _layer(
    emission: Emission,
    value: int,
    shape: Sequence[Dim],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> int:
    fits = emission.half_weights and largest(weight) <= _LARGEST_HALF
    encoding = HALF if fits else emission.writes
    return emission.add(
        NodeKind.FULLY_CONNECTED,
        shape,
        input1_id=value,
        filter_id=emission.constant_value(weight, packed=True, encoding=encoding),
        bias_id=NONE if bias is None else emission.constant_value(bias, packed=True),
        flags=0,
    )


def _lstm(cell: _Cell, share: int, states: _States) -> tuple[int, ...]:
    hidden, memory = states
    gates = _plus(cell, share, cell.product(hidden), len(cell.recurrent))
    enter, forget, leave = (
        cell.unary(NodeKind.SIGMOID, cell.part(gates, number)) for number in (0, 1, 3)
    )
    new = cell.binary(NodeKind.MULTIPLY, enter, cell.unary(NodeKind.TANH, cell.part(gates, 2)))
    if memory is not None:
        new = cell.binary(NodeKind.ADD, cell.binary(NodeKind.MULTIPLY, forget, memory), new)
    return cell.binary(NodeKind.MULTIPLY, leave, cell.unary(NodeKind.TANH, new)), new


def _gru(cell: _Cell, share: int, states: _States) -> tuple[int, ...]:
    (hidden,) = states
    product = cell.product(hidden)

    def of_state(number: int) -> int | None:
        if product is not None:
            return cell.part(product, number)
        if cell.shift is None:
            return None
        first = number * cell.width
        return cell.emission.constant_value(cell.shift[None, first : first + cell.width])

    reset, update = (
        cell.unary(
            NodeKind.SIGMOID, _plus(cell, cell.part(share, number), of_state(number), cell.width)
        )
        for number in (0, 1)
    )
    kept = of_state(2)
    if kept is not None:
        kept = cell.binary(NodeKind.MULTIPLY, reset, kept)
    new = cell.unary(NodeKind.TANH, _plus(cell, cell.part(share, 2), kept, cell.width))
    moved = (
        cell.unary(NodeKind.NEGATE, new)
        if hidden is None
        else cell.binary(NodeKind.SUBTRACT, hidden, new)
    )
    return (cell.binary(NodeKind.ADD, cell.binary(NodeKind.MULTIPLY, moved, update), new),)


def _plain(kind: NodeKind) -> _Step:
    def step(cell: _Cell, share: int, states: _States) -> tuple[int, ...]:
        value = _plus(cell, share, cell.product(states[0]), cell.width)
        limits = (0.0, float("inf")) if kind is NodeKind.CLAMP else None
        shape = (cell.batch, cell.width)
        return (cell.emission.add(kind, shape, output_range=limits, input_id=value),)

    return step


def _plus(cell: _Cell, value: int, other: int | None, width: int) -> int:
    if other is None:
        return value
    shape = (cell.batch, width)
    return cell.emission.add(NodeKind.ADD, shape, input1_id=value, input2_id=other)


def _emitter(step: _Step, *, merges: bool) -> Callable[[Emission, Call], None]:
    """Return what emits a recurrent layer.

    Args:
        step: What one cell computes.
        merges: Whether the shifts of input and state are added to the same sums.
    """

    def emit(emission: Emission, call: Call) -> None:
        args = call.args
        source = emission.of(args["input"])
        value = emission.id_of(source)
        if args["batch_first"]:
            batch, steps, width = source.shape
            value = emission.permuted(value, (1, 0, 2), (steps, batch, width))
        else:
            steps, batch, width = source.shape
        hidden = args["hx"] if isinstance(args["hx"], (list, tuple)) else [args["hx"]]
        states = [emission.of(one) for one in hidden]
        last: list[list[int]] = [[] for _ in states]
        directions = 2 if args["bidirectional"] else 1
        for layer in range(int(args["num_layers"])):
            ways = []
            for way in range(directions):
                number = layer * directions + way
                weights = _weights(emission, call, number, merges=merges)
                cell = _Cell(emission, batch, int(weights[1].shape[1]), weights[1], weights[3])
                shares = _layer(
                    *(emission, value, (steps, batch, len(weights[0])), weights[0], weights[2])
                )
                first = tuple(_state(emission, one, number) for one in states)
                outputs, ends = _run(cell, step, shares, int(steps), first, backwards=way == 1)
                ways.append((outputs, int(cell.width)))
                for kept, end in zip(last, ends, strict=True):
                    kept.append(end)
            width = sum(one[1] for one in ways)
            shape = (steps, batch, width)
            value = joined(emission, ways, shape, 2, Layout.PLAIN)
        if args["batch_first"]:
            value = emission.permuted(value, (1, 0, 2), (batch, steps, width))
        _define(emission, call.node, value, last)

    return emit


def _weights(
    emission: Emission, call: Call, number: int, *, merges: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return what multiplies inputs and states of one cell, and what is added to each."""
    many = 4 if call.args["has_biases"] else 2
    nodes = call.args["params"][number * many : (number + 1) * many]
    inputs, states, *shifts = (emission.constant(node) for node in nodes)
    if not shifts:
        return inputs, states, None, None
    if merges:
        return inputs, states, shifts[0] + shifts[1], None
    return inputs, states, shifts[0], shifts[1]


def _state(emission: Emission, states: Tracked, number: int) -> int | None:
    """Return the first state of one cell, None for 0."""
    if _is_zero(states, number):
        return None
    one = stretch(emission, states, 0, number, 1)
    return emission.reshaped(emission.id_of(one), states.shape[1:])


def _is_zero(state: Tracked, number: int | None = None) -> bool:
    tensor = state.tensor
    return tensor is not None and not bool((tensor if number is None else tensor[number]).any())


def _run(
    cell: _Cell, step: _Step, shares: int, steps: int, states: _States, *, backwards: bool
) -> tuple[int, tuple[int, ...]]:
    """Return the hidden states of all steps as one value, and the last states."""
    emission, gates = cell.emission, len(cell.recurrent)
    every = emission.tracked((steps, cell.batch, gates), shares)
    found: list[int] = []
    ends: tuple[int, ...] = ()
    for number in reversed(range(steps)) if backwards else range(steps):
        one = emission.id_of(stretch(emission, every, 0, number, 1))
        share = emission.reshaped(one, (cell.batch, gates))
        states = ends = step(cell, share, states)
        found.append(emission.reshaped(ends[0], (1, cell.batch, cell.width)))
    parts = [(one, 1) for one in (found[::-1] if backwards else found)]
    shape = (steps, cell.batch, cell.width)
    return joined(emission, parts, shape, 0, Layout.PLAIN), ends


def _define(emission: Emission, node: Node, value: int, last: Sequence[Sequence[int]]) -> None:
    for user in node.users:
        number = int(user.args[1])  # type: ignore[arg-type]  # the index of a getitem
        if number == 0:
            emission.define_value(user, value)
            continue
        shape = tuple(user.meta["val"].shape)
        single = (1, *shape[1:])
        parts = [(emission.reshaped(one, single), 1) for one in last[number - 1]]
        emission.define_value(user, joined(emission, parts, shape, 0, Layout.PLAIN))


def _refusal(call: Call) -> str | None:
    args = call.args
    hidden = args["hx"] if isinstance(args["hx"], (list, tuple)) else [args["hx"]]
    many = (4 if args["has_biases"] else 2) * (2 if args["bidirectional"] else 1)
    if args["train"] and args["dropout"]:
        return "it drops out"
    if call.rank("input") != 3:
        return "its input needs 3 dimensions"
    if len(args["params"]) != many * args["num_layers"]:
        return "its states are projected"
    if not all(isinstance(one, Node) for one in hidden) or not all(
        one.name in call.constants for one in args["params"]
    ):
        return "its weights are not constant"
    steps = call.shape("input")[1 if args["batch_first"] else 0]
    if not is_fixed(steps) or not 0 < steps <= _MOST_STEPS:
        return f"it takes a symbolic number of steps, or more than {_MOST_STEPS}"
    return None


def _cell_emitter(step: _Step, *, merges: bool) -> Callable[[Emission, Call], None]:
    """Return the emitter of a single cell; the arguments are those of ``_emitter``."""

    def emit(emission: Emission, call: Call) -> None:
        args = call.args
        inputs, recurrent = (emission.constant(args[name]) for name in ("w_ih", "w_hh"))
        shift, state_shift = (
            None if args[name] is None else emission.constant(args[name])
            for name in ("b_ih", "b_hh")
        )
        if merges and state_shift is not None:
            # A state of zeros adds nothing, and its bias would be left out with it.
            shift = state_shift if shift is None else shift + state_shift
            state_shift = None
        value = emission.of(args["input"])
        batch = value.shape[0]
        cell = _Cell(emission, batch, int(recurrent.shape[1]), recurrent, state_shift)
        shape = (batch, len(inputs))
        share = _layer(emission, emission.id_of(value), shape, inputs, shift)
        hidden = args["hx"] if isinstance(args["hx"], (list, tuple)) else [args["hx"]]
        states = [emission.of(one) for one in hidden]
        new = step(
            *(cell, share),
            tuple(None if _is_zero(one) else emission.id_of(one) for one in states),
        )
        if len(states) == 1:
            emission.define_value(call.node, new[0])
            return
        for user in call.node.users:
            emission.define_value(user, new[int(user.args[1])])  # type: ignore[arg-type]

    return emit


def _cell_refusal(call: Call) -> str | None:
    if call.rank("input") != 2:
        return "its input needs 2 dimensions"
    weights = [call.args[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh")]
    if not all(one is None or one.name in call.constants for one in weights):
        return "its weights are not constant"
    return None


def _layer_and_cell(layer: Any, cell: Any, step: _Step, *, merges: bool = True) -> Table:
    return {
        layer: Operator(_emitter(step, merges=merges), _refusal),
        cell: Operator(_cell_emitter(step, merges=merges), _cell_refusal),
    }


RECURRENT: Table = {
    **_layer_and_cell(_aten.lstm.input, _aten.lstm_cell.default, _lstm),
    **_layer_and_cell(_aten.gru.input, _aten.gru_cell.default, _gru, merges=False),
    **_layer_and_cell(_aten.rnn_tanh.input, _aten.rnn_tanh_cell.default, _plain(NodeKind.TANH)),
    **_layer_and_cell(_aten.rnn_relu.input, _aten.rnn_relu_cell.default, _plain(NodeKind.CLAMP)),
}
