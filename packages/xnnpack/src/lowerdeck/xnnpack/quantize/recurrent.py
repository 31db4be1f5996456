"""Unroll LSTM and GRU into linear layers for quantisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def unroll_recurrent_layers(module: nn.Module) -> nn.Module:
    """Replace each ``nn.LSTM``, ``nn.GRU`` and their cells by linear layers, in place.

    Quantisers do not support the operators of recurrent layers. A layer becomes a loop over time,
    whose export time is proportional to its steps.

    Args:
        module: A model in evaluation mode.

    Returns:
        The model, or its replacement if it is such a layer itself.
    """
    unrolled: dict[nn.Module, nn.Module] = {}
    for layer in module.modules():
        if type(layer) in (nn.LSTM, nn.GRU):
            unrolled[layer] = UnrolledRecurrent(layer)
        elif type(layer) in (nn.LSTMCell, nn.GRUCell):
            unrolled[layer] = UnrolledCell(layer)
    # A shared layer has several names.
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if name and child in unrolled:
            module.set_submodule(name, unrolled[child])
    return unrolled.get(module, module)


class UnrolledRecurrent(nn.Module):
    """LSTM or GRU composed of linear layers, without dropout.

    Args:
        layer: The layer; its weights are shared.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.is_lstm: bool = isinstance(layer, nn.LSTM)
        self.batch_first: bool = layer.batch_first
        self.directions: int = 2 if layer.bidirectional else 1
        ends = [
            f"_l{number}{suffix}"
            for number in range(layer.num_layers)
            for suffix in ("", "_reverse")[: self.directions]
        ]
        self.cells: nn.ModuleList = nn.ModuleList(UnrolledCell(layer, name) for name in ends)

    def flatten_parameters(self) -> None:
        """Do nothing: flattened parameters are for GPUs only."""

    def forward(
        self, x: torch.Tensor, hx: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
        """Return the results of all steps, and the last state.

        Args:
            x: Shape (time, batch, features), or according to ``batch_first``, or unbatched.
            hx: The initial state (torch's name); zeros for None.
        """
        is_single = x.dim() == 2
        steps = x.unsqueeze(1) if is_single else x.transpose(0, 1) if self.batch_first else x
        first: list[Any] = [None] * len(self.cells)
        if hx is not None:
            parts = hx if self.is_lstm else (hx,)
            tensors = [part.unsqueeze(1) if is_single else part for part in parts]
            first = list(zip(*(tensor.unbind(0) for tensor in tensors), strict=True))
        last = []
        for start in range(0, len(first), self.directions):
            results = []
            for number in range(start, start + self.directions):
                cell: Any = self.cells[number]
                result, state = cell.run(steps, first[number], backwards=number > start)
                results.append(result)
                last.append(state)
            steps = torch.cat(results, -1) if self.directions == 2 else results[0]
        states = [torch.stack(part) for part in zip(*last, strict=True)]
        if is_single:
            steps, states = steps.squeeze(1), [state.squeeze(1) for state in states]
        elif self.batch_first:
            steps = steps.transpose(0, 1)
        return steps, (states[0], states[1]) if self.is_lstm else states[0]


class UnrolledCell(nn.Module):
    """LSTM or GRU cell composed of linear layers; also one direction of a layer.

    Args:
        cell: The cell or layer; its weights are shared.
        suffix: Suffix of its weight names.
    """

    def __init__(self, cell: Any, suffix: str = "") -> None:
        super().__init__()
        self.is_lstm: bool = isinstance(cell, (nn.LSTM, nn.LSTMCell))
        self.hidden_size: int = cell.hidden_size
        self.input: nn.Linear = _linear(cell, f"weight_ih{suffix}", f"bias_ih{suffix}")
        self.state: nn.Linear = _linear(cell, f"weight_hh{suffix}", f"bias_hh{suffix}")
        projects = bool(getattr(cell, "proj_size", 0))
        self.projection: nn.Module = (
            _linear(cell, f"weight_hr{suffix}", None) if projects else nn.Identity()
        )

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002  (torch's name)
        hx: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the next state.

        Args:
            input: Shape (batch, features), or unbatched.
            hx: The state; zeros for None.
        """
        state = hx if self.is_lstm or hx is None else (hx,)
        new = self._next(self.input(input), state)
        return new if self.is_lstm else new[0]

    def run(
        self, steps: torch.Tensor, first: Any, *, backwards: bool
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the results of all steps, and the last state.

        Args:
            steps: Shape (time, batch, features).
            first: The initial state; zeros for None.
            backwards: Whether to run from the last step to the first.
        """
        gates = list(self.input(steps).unbind(0))
        state, results = first, []
        for gate in reversed(gates) if backwards else gates:
            state = self._next(gate, state)
            results.append(state[0])
        return torch.stack(results[::-1] if backwards else results), state

    def _next(self, gates: torch.Tensor, state: Any) -> tuple[torch.Tensor, ...]:
        if state is None:
            sizes = (self.state.in_features, self.hidden_size)
            state = tuple(gates.new_zeros(*gates.shape[:-1], size) for size in sizes)
        more = self.state(state[0])
        if not self.is_lstm:
            return (_gru_step(gates, more, state[0]),)
        hidden, cell = _lstm_step(gates + more, state[1])
        return self.projection(hidden), cell


def _gru_step(gates: torch.Tensor, more: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    reset, update, new = gates.chunk(3, -1)
    reset_more, update_more, new_more = more.chunk(3, -1)
    update = torch.sigmoid(update + update_more)
    new = torch.tanh(new + torch.sigmoid(reset + reset_more) * new_more)
    return new + update * (hidden - new)


def _lstm_step(gates: torch.Tensor, cell: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    input_gate, forget, new, output = gates.chunk(4, -1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(input_gate) * torch.tanh(new)
    return torch.sigmoid(output) * torch.tanh(cell), cell


def _linear(layer: nn.Module, weight: str, bias: str | None) -> nn.Linear:
    matrix = getattr(layer, weight)
    vector = getattr(layer, bias, None) if bias else None
    linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=vector is not None, device="meta")
    linear.weight = matrix
    if vector is not None:
        linear.bias = vector
    return linear.eval()
