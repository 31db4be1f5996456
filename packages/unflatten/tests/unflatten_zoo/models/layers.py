"""Ordinary models: stacks, containers, attention, recurrence, experts, parametrised layers."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.export import Dim

from unflatten_zoo.case import Case


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)
        self.drop = nn.Dropout(0.25)

    def forward(self, x):
        return self.head(self.drop(self.bn(self.conv(x)).relu()).mean((2, 3)))


class Containers(nn.Module):
    """Lists and dicts of modules and parameters, a module that is never called, plain tensors."""

    def __init__(self):
        super().__init__()
        first = OrderedDict([("a b", nn.Linear(4, 4)), ("1x", nn.ReLU())])
        self.named = nn.ModuleDict({"b": nn.Linear(4, 4), "a": nn.Sequential(first)})
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(12)])
        self.by_name = nn.ParameterDict({"y": nn.Parameter(torch.randn(4))})
        self.unused = nn.Sequential(nn.Linear(2, 2))
        self.held = [torch.ones(4), {"k": torch.zeros(4)}]

    def forward(self, x):
        for child in self.named.values():
            x = child(x)
        for weight in reversed(list(self.weights)):
            x = x * weight
        return x + self.by_name["y"] - self.held[0] * self.held[1]["k"]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, bidirectional=True, batch_first=True)
        self.gru, self.cell = nn.GRU(6, 5), nn.LSTMCell(5, 5)

    def forward(self, x):
        y, (h, c) = self.lstm(x)
        z, _ = self.gru(y)
        state = (z[0], z[1])
        for step in z:
            state = self.cell(step, state)
        return y, h, c, state


class Attends(nn.Module):
    """Calls one attention with and without weights: two specializations."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        y, weights = self.attention(x, x + 1, x - 1)
        z, _ = self.attention(x, y, y.sin(), need_weights=False)
        return y, weights, z


class AttendsToItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x, *, causal):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if causal else None
        y = self.norm(x)
        z, _ = self.attention(y, y, y, attn_mask=mask, need_weights=False)
        x = x + z
        return x + self.mlp(x)


class Transformer(nn.Module):
    """A constant keyword, a tied head, a dict of results."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, causal=True)
        return {"logits": self.head(x), "hidden": [x]}


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Bare(nn.Module):
    """Layers without the bias or weight that others of their class have."""

    def __init__(self):
        super().__init__()
        self.linear, self.conv = nn.Linear(4, 4, bias=False), nn.Conv1d(3, 3, 1, bias=False)
        self.norm = nn.LayerNorm(4, bias=False)
        self.bare = nn.LayerNorm(4, elementwise_affine=False)
        self.batch = nn.BatchNorm1d(3, affine=False)

    def forward(self, x):
        return self.batch(self.conv(self.bare(self.norm(self.linear(x)))))


class Rms(nn.Module):
    """Converts to float32, which returns the argument: the residual of the caller."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x):
        wide = x.to(torch.float32).contiguous()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return torch.mul(self.weight, scaled.to(x.dtype))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.work = Rms(), nn.Linear(4, 4)

    def forward(self, x):
        return torch.add(x, self.work(self.norm(x)))


class HandsOn(nn.Module):
    """Gives one value to a module, to another one and to its caller."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.work = Residual(), Rms(), nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x)
        return self.norm(y), self.work(y), y, x


class OtherWeights(nn.Module):
    """Calls a layer with weights that are not the layer's."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        weights = {name: value * 2 for name, value in self.layer.named_parameters()}
        return self.last(torch.func.functional_call(self.layer, weights, (x,)))


class Experts(nn.Module):
    """Is given the rows of all sequences, and makes two of each."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x, chosen, weights):
        rows = x.shape[0]
        order = chosen.reshape(-1).argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(2 * rows)
        made = torch.einsum("ri,rio->ro", x[order // 2], self.weight[chosen.reshape(-1)[order]])
        return (made[back].view(rows, 2, 8) * weights[..., None]).sum(1)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), Experts()

    def forward(self, x):
        batch, length, size = x.shape
        rows = x.reshape(-1, size)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        return x + self.experts(rows, chosen, weights).reshape(batch, length, size)


class Norms(nn.Module):
    """Calls a normalisation twice, on parts of what another one returned."""

    def __init__(self):
        super().__init__()
        self.batch, self.layer = nn.BatchNorm1d(4), nn.LayerNorm(4)

    def forward(self, x):
        y, z = self.layer(self.batch(x)).float().chunk(2, 1)
        return self.batch(torch.cat([z, y], 1).contiguous())


class Slopes(nn.Module):
    """Blocks of one class whose code differs in a constant."""

    class Block(nn.Module):
        def __init__(self, slope):
            super().__init__()
            self.fc, self.slope = nn.Linear(2, 2), slope

        def forward(self, x):
            return self.fc(x) * self.slope + x

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*map(self.Block, (0.5, -0.0, 0.5, 0.0, 1.0)))

    def forward(self, x):
        return self.blocks(x)


def randn(*shape):
    return lambda: (torch.randn(*shape),)


CASES = (
    Case("mlp", mlp, randn(2, 4)),
    Case("cnn", Cnn, randn(2, 3, 4, 4)),
    Case("cnn in training", Cnn, randn(4, 3, 4, 4), training=True, without="threads"),
    Case("containers", Containers, randn(2, 4)),
    Case("recurrent", Recurrent, randn(3, 2, 4)),
    Case("attention", Attends, randn(2, 5, 8), marked=("attention",)),
    Case("attention to itself", AttendsToItself, randn(2, 3, 8)),
    Case("transformer", Transformer, lambda: (torch.randint(20, (1, 4)),)),
    # Torch's encoder reads attributes of its first layer, which a wrapper lacks.
    Case("encoder", encoder, randn(2, 3, 8), training=True, without="wrapping"),
    Case("bare layers", Bare, randn(2, 3, 4)),
    Case("residual", lambda: nn.Sequential(Residual(), Residual()), randn(2, 4)),
    Case("hands a value on", HandsOn, randn(2, 4)),
    Case("other weights", OtherWeights, randn(2, 4), marked=("layer",)),
    Case(
        "experts",
        lambda: nn.Sequential(Mixture(), Mixture()),
        lambda rows, length: (torch.randn(rows, length, 8),),
        ((2, 7), (3, 11)),
        ({0: Dim("b", max=16), 1: Dim("t", max=32)},),
    ),
    Case("norms in training", Norms, randn(3, 4), training=True, without="threads"),
    Case("slopes", Slopes, randn(3, 2)),
)
"""The cases of this module."""
