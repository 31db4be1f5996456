"""Transformers for text, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch import nn

from lowerdeck_zoo.program import Holding, Program


def _tokens(count: int, length: int = 12, batch: int = 1):
    return lambda: [(torch.randint(0, 50, (batch, length)),) for _ in range(count)]


class CausalBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2-like, with the head tied to the embedding."""

    def __init__(self, width: int = 32, depth: int = 2, heads: int = 4, words: int = 50) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(CausalBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])
        return self.head(self.norm(self.blocks(self.words(tokens) + self.places(places))))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class LlamaBlock(nn.Module):
    """Rotary positions, grouped queries, gated feed-forward."""

    def __init__(self, width: int = 32, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * cos + turned * sin

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(y).view(batch, length, self.groups, self.size).transpose(1, 2)
        v = self.v(y).view(batch, length, self.groups, self.size).transpose(1, 2)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        mask = torch.full((length, length), float("-inf")).triu(1)
        scores = (q @ k.transpose(2, 3)) / self.size**0.5 + mask
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.o(y)
        z = self.norm2(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))


class Llama(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2, words: int = 50) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(LlamaBlock(width) for _ in range(depth))
        self.norm, self.size = RMSNorm(width), self.blocks[0].size
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        rates = 10000.0 ** (-torch.arange(0, self.size, 2) / self.size)
        angles = torch.outer(torch.arange(tokens.shape[1]).float(), rates)
        angles = torch.cat([angles, angles], -1)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


class EmbeddingBag(Holding, left=lambda: nn.Embedding(50, 16), right=lambda: nn.Embedding(50, 16)):
    """A two-tower scorer: gather, mean, normalise, score."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        a = F.normalize(self.left(tokens).mean(1), dim=-1)
        b = F.normalize(self.right(tokens).amax(1), dim=-1)
        return F.cosine_similarity(a[:, None], b[None], dim=-1)


class EncoderDecoder(nn.Module):
    """An encoder and a decoder that share an embedding, as two methods of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.words(tokens))[1]

    def decode(self, state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.body(self.words(token), state)
        return hidden @ self.words.weight.t()


def _texts() -> list[tuple[object, ...]]:
    return [
        *(("encode", torch.randint(0, 20, (1, 6))) for _ in range(2)),
        *(("decode", torch.randn(1, 1, 8), torch.randint(0, 20, (1, 1))) for _ in range(2)),
    ]


PROGRAMS = (
    Program("gpt_tied", GPT, _tokens(3), tags="shared-weights"),
    Program("llama_like", Llama, _tokens(3)),
    Program("two_towers", EmbeddingBag, _tokens(3, batch=3)),
    Program(
        "encode_and_decode",
        EncoderDecoder,
        _texts,
        methods=("encode", "decode"),
        tags="several-methods shared-weights",
    ),
)
