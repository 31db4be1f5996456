"""LSTM and GRU written as linear layers, which can be quantised."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def unroll_recurrent_layers(module: nn.Module) -> nn.Module:
    """Replace each ``nn.LSTM``, ``nn.GRU`` and cell of one by linear layers, in place.

    Quantisers look for linear layers; the operators of recurrent layers hide theirs. A layer
    becomes a loop over time, whose export takes time in proportion to its steps.

    Args:
        module: A model in evaluation mode.

    Returns:
        The model; another one where it is such a layer itself.
    """
    unrolled: dict[nn.Module, nn.Module] = {}
    for layer in module.modules():
        if type(layer) in (nn.LSTM, nn.GRU):
            unrolled[layer] = UnrolledRecurrent(layer)
        elif type(layer) in (nn.LSTMCell, nn.GRUCell):
            unrolled[layer] = UnrolledCell(layer)
    # A layer may have several names.
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if name and child in unrolled:
            module.set_submodule(name, unrolled[child])
    return unrolled.get(module, module)


class UnrolledRecurrent(nn.Module):
    """What an LSTM or a GRU computes, without dropout.

    Args:
        layer: The layer; its weights are shared.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.is_lstm: bool = isinstance(layer, nn.LSTM)
        self.batch_first: bool = layer.batch_first
        self.hidden_size: int = layer.hidden_size
        self.result_size: int = layer.proj_size or layer.hidden_size
        self.num_layers: int = layer.num_layers
        self.directions: int = 2 if layer.bidirectional else 1
        self.inputs: nn.ModuleList = nn.ModuleList()
        self.states: nn.ModuleList = nn.ModuleList()
        self.projections: nn.ModuleList = nn.ModuleList()
        for number in range(layer.num_layers * self.directions):
            suffix = f"_l{number // self.directions}{'_reverse' * (number % self.directions)}"
            self.inputs.append(_linear(layer, f"weight_ih{suffix}", f"bias_ih{suffix}"))
            self.states.append(_linear(layer, f"weight_hh{suffix}", f"bias_hh{suffix}"))
            if layer.proj_size:
                self.projections.append(_linear(layer, f"weight_hr{suffix}", None))

    def flatten_parameters(self) -> None:
        """Do nothing: only layers on a GPU have their parameters in one piece."""

    def forward(
        self, x: torch.Tensor, hx: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
        """Return the results of all steps, and the last state.

        Args:
            x: Of shape (time, batch, features), or as ``batch_first`` says, or without a batch.
            hx: The first state, by the name that torch's layers have for it; zeros for None.
        """
        is_single = x.dim() == 2
        steps = x.unsqueeze(1) if is_single else x.transpose(0, 1) if self.batch_first else x
        first: list[Any] = [None] * len(self.inputs)
        if hx is not None:
            parts = hx if self.is_lstm else (hx,)
            tensors = [part.unsqueeze(1) if is_single else part for part in parts]
            first = list(zip(*(tensor.unbind(0) for tensor in tensors), strict=True))
        last = []
        for layer in range(self.num_layers):
            results = []
            for direction in range(self.directions):
                number = layer * self.directions + direction
                result, state = self._run(number, steps, first[number], backwards=direction == 1)
                results.append(result)
                last.append(state)
            steps = torch.cat(results, -1) if self.directions == 2 else results[0]
        states = [torch.stack(part) for part in zip(*last, strict=True)]
        if is_single:
            steps, states = steps.squeeze(1), [state.squeeze(1) for state in states]
        elif self.batch_first:
            steps = steps.transpose(0, 1)
        return steps, (states[0], states[1]) if self.is_lstm else states[0]

    def _run(
        self, number: int, steps: torch.Tensor, first: Any, *, backwards: bool
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the results of one layer in one direction, and its last state."""
        gates = list(self.inputs[number](steps).unbind(0))
        if first is None:
            batch = steps.shape[1]
            sizes = (self.result_size, self.hidden_size)
            first = tuple(steps.new_zeros(batch, size) for size in sizes)
        state, results = first, []
        for gate in reversed(gates) if backwards else gates:
            state = self._step(number, gate, state)
            results.append(state[0])
        if backwards:
            results.reverse()
        return torch.stack(results), state if self.is_lstm else state[:1]

    def _step(self, number: int, gate: torch.Tensor, state: Any) -> tuple[torch.Tensor, ...]:
        more = self.states[number](state[0])
        if not self.is_lstm:
            return (_gru_step(gate, more, state[0]),)
        hidden, cell = _lstm_step(gate + more, state[1])
        return self.projections[number](hidden) if self.projections else hidden, cell


class UnrolledCell(nn.Module):
    """What an LSTM cell or a GRU cell computes.

    Args:
        cell: The cell; its weights are shared.
    """

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.is_lstm: bool = isinstance(cell, nn.LSTMCell)
        self.input: nn.Linear = _linear(cell, "weight_ih", "bias_ih")
        self.state: nn.Linear = _linear(cell, "weight_hh", "bias_hh")

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002  (torch's name)
        hx: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the next state.

        Args:
            input: Of shape (batch, features), or without a batch.
            hx: The state, zeros for None. Both names are those of torch's cells.
        """
        if hx is None:
            hidden = input.new_zeros(*input.shape[:-1], self.state.in_features)
            hx = (hidden, hidden) if self.is_lstm else hidden
        if self.is_lstm:
            return _lstm_step(self.input(input) + self.state(hx[0]), hx[1])
        return _gru_step(self.input(input), self.state(hx), hx)


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
    made = nn.Linear(matrix.shape[1], matrix.shape[0], bias=vector is not None, device="meta")
    made.weight = matrix
    if vector is not None:
        made.bias = vector
    return made.eval()
