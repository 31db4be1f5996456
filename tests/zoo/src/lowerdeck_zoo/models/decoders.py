"""What today's language models are made of, each on its own."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.export import Dim

from lowerdeck_zoo.program import Holding, Program, drawn, normal


class Experts(nn.Module):
    """A mixture: the two best of four experts for each token, added up where they belong."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, width, 16) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 16, width) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        expert, slot = chosen.flatten().sort(stable=True)
        token = slot // 2
        rows = torch.bmm(x[token].unsqueeze(1), self.up[expert])
        rows = torch.bmm(F.silu(rows), self.down[expert]).squeeze(1)
        rows = rows * weights.flatten()[slot].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, rows)


class OneHotExperts(nn.Module):
    """A mixture of the kind that runs every expert and hides what was not chosen."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share = self.router(x).softmax(-1)
        chosen = F.one_hot(share.argmax(-1), 3)
        total = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            total = total + expert(x) * (share * chosen)[..., index : index + 1]
        return total, chosen.sum((0, 1))


class ComplexRotary(nn.Module):
    """Rotary positions as Llama's own code has them: as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        rates = 1.0 / (100.0 ** (torch.arange(0, 8, 2) / 8))
        angles = torch.outer(torch.arange(16.0), rates)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = pairs * self.turns[: x.shape[1]].view(1, x.shape[1], 1, -1)
        return torch.view_as_real(turned).flatten(3).type_as(x)


class Alibi(nn.Module):
    """Attention with a slope for each head, of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1])
        bias = -(places[:, None] - places[None]).abs() * self.slopes
        seen = places[None] <= places[:, None]
        bias = bias.masked_fill(~seen, -math.inf)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))
        return y.transpose(1, 2).flatten(2)


class Window(nn.Module):
    """Attention to the last three tokens, and scores that are capped."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length = q.shape[-2]
        near = torch.ones(length, length, dtype=torch.bool).tril().triu(-2)
        scores = torch.tanh(q @ k.transpose(-1, -2) / 20.0) * 20.0
        return scores.masked_fill(~near, -1e9).softmax(-1) @ v


class Int8Linear(nn.Module):
    """Weights in eight bits with a scale for each row, and a low-rank addition."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (6, 8), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(6) * 0.01)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = F.linear(x, self.weight.to(x.dtype)) * self.scales
        return whole + self.up(self.down(x)) * 0.5


class Int4Linear(nn.Module):
    """Two weights in each byte, with a scale for each group of four."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", torch.randint(0, 256, (6, 4), dtype=torch.uint8))
        self.register_buffer("scales", torch.rand(6, 2, 1) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self.packed & 15, self.packed >> 4
        steps = torch.stack([low, high], -1).flatten(1).to(torch.float32) - 8
        return F.linear(x, (steps.view(6, 2, 4) * self.scales).flatten(1))


class Speculative(nn.Module):
    """A cache that takes several tokens at once and can be set back to fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(12, 4))
        self.register_buffer("length", torch.zeros(1, dtype=torch.int64))
        self.k, self.q = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, accepted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.length.copy_(torch.minimum(self.length, accepted))
        places = self.length + torch.arange(x.shape[0])
        self.cache.index_copy_(0, places, self.k(x))
        seen = torch.arange(12)[None] <= places[:, None]
        scores = (self.q(x) @ self.cache.T).masked_fill(~seen, -math.inf)
        self.length.add_(x.shape[0])
        return scores.softmax(-1) @ self.cache, self.length.clone()


class Ring(
    Holding, keys=lambda: torch.zeros(2, 4, 3), count=lambda: torch.zeros((), dtype=torch.int64)
):
    """A cache of the last four tokens, written round and round."""

    def forward(self, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.index_put_((torch.arange(2), (self.count % 4).expand(2)), key)
        self.count += 1
        full = torch.minimum(self.count, torch.tensor(4))
        return self.keys.sum(1) / full, torch.arange(4) < self.count


class Translator(nn.Module):
    """Sequence to sequence: an encoder both ways, a decoder that attends, greedy choice."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(20, width)
        self.encode = nn.GRU(width, width, bidirectional=True, batch_first=True)
        self.bridge, self.query = nn.Linear(2 * width, width), nn.Linear(width, 2 * width)
        self.cell = nn.GRUCell(3 * width, width)
        self.out = nn.Linear(3 * width, 20)

    def forward(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory, _ = self.encode(self.words(text))
        state = torch.tanh(self.bridge(memory.mean(1)))
        word = torch.ones(text.shape[0], dtype=torch.int64)
        words, scores = [], []
        for _ in range(4):
            weights = torch.einsum("bd,bnd->bn", self.query(state), memory)
            weights = weights.masked_fill(text == 0, -1e9).softmax(-1)
            context = torch.einsum("bn,bnd->bd", weights, memory)
            state = self.cell(torch.cat([self.words(word), context], -1), state)
            score = self.out(torch.cat([state, context], -1)).log_softmax(-1)
            word = score.argmax(-1)
            words.append(word)
            scores.append(score)
        return torch.stack(words, 1), torch.stack(scores, 1)


class StateSpace(nn.Module):
    """A selective state space, gone through by a scan."""

    def __init__(self, width: int = 6, state: int = 4) -> None:
        super().__init__()
        self.parts = nn.Linear(width, 2 * state + width)
        self.decay = nn.Parameter(torch.rand(width, state))
        self.state = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        b, c, step = self.parts(x).split([self.state, self.state, width], -1)
        step = F.softplus(step)
        decay = torch.exp(-step.unsqueeze(-1) * self.decay)
        given = (step * x).unsqueeze(-1) * b.unsqueeze(1)

        def once(h: torch.Tensor, row: tuple[torch.Tensor, ...]):
            decay, given, c = row
            h = h * decay + given
            return h, h @ c

        start = torch.zeros(width, self.state)
        return scan(once, start, (decay, given, c))[1]


class LinearAttention(nn.Module):
    """Running sums instead of a softmax."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        memory = torch.cumsum(torch.einsum("bnd,bne->bnde", k, v), 1)
        total = torch.cumsum(k, 1)
        above = torch.einsum("bnd,bnde->bne", q, memory)
        return above / torch.einsum("bnd,bnd->bn", q, total).unsqueeze(-1)


class NucleusChoice(nn.Module):
    """The smallest set of tokens that holds most of the probability; a penalty for repeats."""

    def forward(self, scores: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        old = scores.gather(1, past)
        scores = scores.scatter(1, past, torch.where(old < 0, old * 1.2, old / 1.2))
        ordered, places = scores.sort(-1, descending=True)
        share = ordered.softmax(-1)
        hidden = share.cumsum(-1) - share > 0.8
        ordered = ordered.masked_fill(hidden, -math.inf)
        back = torch.full_like(scores, -math.inf).scatter(1, places, ordered)
        return back.softmax(-1), back.argmax(-1), (~hidden).sum(-1)


_LENGTH = Dim("length", min=2, max=16)

PROGRAMS = (
    Program("experts_sorted", Experts, normal(5, 8)),
    Program("experts_hidden", OneHotExperts, normal(2, 3, 8)),
    Program("rotary_complex", ComplexRotary, normal(2, 5, 3, 8), tags="complex"),
    Program(
        "rotary_complex_of_any_length",
        ComplexRotary,
        lambda: [(torch.randn(2, n, 3, 8),) for n in (5, 2, 16)],
        ({1: _LENGTH},),
        tags="complex dynamic",
    ),
    Program(
        "alibi",
        Alibi,
        lambda: [(torch.randn(2, n, 16),) for n in (6, 2, 16)],
        ({1: _LENGTH},),
        tags="dynamic",
    ),
    Program(
        "sliding_window",
        Window,
        lambda: [tuple(torch.randn(1, 2, n, 4) for _ in range(3)) for n in (6, 3, 16)],
        tuple({2: _LENGTH} for _ in range(3)),
        tags="dynamic",
    ),
    Program("int8_weights_with_lora", Int8Linear, normal(3, 8), tags="quantised"),
    Program("int4_weights", Int4Linear, normal(3, 8), tags="quantised"),
    Program(
        "speculative_cache",
        Speculative,
        lambda: [(torch.randn(2, 4), torch.tensor([n])) for n in (0, 2, 3, 9)],
        tags="in-place stateful",
    ),
    Program("ring_cache", Ring, normal(2, 3, repeat=6), tags="in-place stateful"),
    Program(
        "translator",
        Translator,
        drawn(lambda: (torch.randint(0, 20, (2, 6)),)),
        tags="shared-weights",
    ),
    Program("state_space", StateSpace, normal(5, 6), tags="control-flow"),
    Program(
        "linear_attention",
        LinearAttention,
        drawn(lambda: tuple(torch.randn(2, 5, 4) for _ in range(3))),
    ),
    Program(
        "nucleus_choice",
        NucleusChoice,
        drawn(lambda: (torch.randn(2, 12), torch.randint(0, 12, (2, 3)))),
    ),
)
