"""Recurrent networks."""

from __future__ import annotations

import torch
from torch import nn

from lowerdeck_zoo.program import Holding, Program, normal


class Last(nn.Module):
    """The output of a recurrent network and its final state."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor):
        return self.network(x)


class Cells(Holding, lstm=lambda: nn.LSTMCell(8, 8), gru=lambda: nn.GRUCell(8, 8)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, c = self.lstm(x[:, 0])
        for step in range(1, x.shape[1]):
            h, c = self.lstm(x[:, step], (h, c))
            h = self.gru(x[:, step], h)
        return h * c


def _lstm() -> nn.Module:
    return Last(nn.LSTM(8, 12, num_layers=2, batch_first=True))


def _bidirectional() -> nn.Module:
    return Last(nn.LSTM(8, 6, bidirectional=True, batch_first=True))


def _gru() -> nn.Module:
    return Last(nn.GRU(8, 12, batch_first=True))


def _tanh() -> nn.Module:
    return Last(nn.RNN(8, 12, batch_first=True, nonlinearity="relu"))


PROGRAMS = (
    Program("lstm", _lstm, normal(2, 5, 8)),
    Program("lstm_bidirectional", _bidirectional, normal(2, 4, 8)),
    Program("gru", _gru, normal(2, 5, 8)),
    Program("rnn", _tanh, normal(2, 5, 8)),
    Program("cells", Cells, normal(2, 4, 8), tags="shared-weights"),
)
