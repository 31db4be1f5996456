"""Models of sound: waveforms, spectra, characters by and by."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch import nn

from lowerdeck_zoo.program import Holding, Program, drawn, normal


class ConvTasNet(nn.Module):
    """Separates two voices: a learned spectrum, masks by dilated convolutions, overlap and add."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.encode = nn.Conv1d(1, width, 8, stride=4, bias=False)
        self.norm = nn.GroupNorm(1, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, 2 * width, 1),
                nn.PReLU(),
                nn.GroupNorm(1, 2 * width),
                nn.Conv1d(2 * width, 2 * width, 3, padding=2**i, dilation=2**i, groups=2 * width),
                nn.PReLU(),
                nn.GroupNorm(1, 2 * width),
                nn.Conv1d(2 * width, width, 1),
            )
            for i in range(3)
        )
        self.masks = nn.Conv1d(width, 2 * width, 1)
        self.decode = nn.ConvTranspose1d(width, 1, 8, stride=4, bias=False)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        spectrum = self.encode(wave.unsqueeze(1))
        x = self.norm(spectrum)
        for block in self.blocks:
            x = x + block(x)
        masks = torch.sigmoid(self.masks(x)).unflatten(1, (2, -1))
        parts = masks * spectrum.unsqueeze(1)
        return self.decode(parts.flatten(0, 1)).view(wave.shape[0], 2, -1)


class _StreamingLayer(nn.Module):
    """Attends to its segment, to keys of the past, and to means of segments before: Emformer's.

    How much past there is, is data: none in the first call.
    """

    segment, kept, memories = 4, 6, 3

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.ReLU())
        self.back = nn.Linear(32, width)
        self.mean = nn.AvgPool1d(self.segment, self.segment, ceil_mode=True)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0], -1, self.heads, self.width // self.heads).permute(1, 2, 0, 3)

    def forward(
        self,
        now: torch.Tensor,
        ahead: torch.Tensor,
        past: torch.Tensor,
        memory: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        steps = past[0].item()
        torch._check(steps >= 0)
        torch._check(steps <= 100)
        left = torch.sym_min(steps, self.kept)
        held = torch.sym_min((steps + self.segment - 1) // self.segment, self.memories)
        summaries = memory[self.memories - held :]
        old = keys[self.kept - left :], values[self.kept - left :]
        x, y = self.norm(now), self.norm(ahead)
        summary = self.mean(x.permute(1, 2, 0)).permute(2, 0, 1)
        asked = self.query(torch.cat([y, x, summary]))
        key, value = self.key_value(torch.cat([summaries, y, x])).chunk(2, -1)
        cut = held + ahead.shape[0]
        seen = [
            torch.cat([new[:cut], before, new[cut:]])
            for new, before in zip((key, value), old, strict=True)
        ]
        scores = self._heads(asked) @ self._heads(seen[0]).transpose(-1, -2)
        weights = (scores * (self.width // self.heads) ** -0.5).softmax(-1)
        mixed = self.out((weights @ self._heads(seen[1])).permute(2, 0, 1, 3).reshape(asked.shape))
        found, told = mixed[:-1] + torch.cat([ahead, now]), mixed[-1:].tanh()
        found = self.last(found + self.back(self.feed(found)))
        more = (torch.cat([keys, key[cut:]]), torch.cat([values, value[cut:]]))
        return (
            *(found[ahead.shape[0] :], found[: ahead.shape[0]], past + self.segment),
            torch.cat([memory, told])[-self.memories :],
            *(one[-self.kept :] for one in more),
        )


class Emformer(Holding, layers=lambda: nn.ModuleList(_StreamingLayer(16, 2) for _ in range(2))):
    """One call of streaming recognition: a segment, what comes after it, and the states."""

    def forward(self, x: torch.Tensor, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        now, ahead = x[:-1], x[-1:]
        after = []
        for number, layer in enumerate(self.layers):
            now, ahead, *rest = layer(now, ahead, *(state[number] for state in states))
            after.append(rest)
        return now, *(torch.stack(parts) for parts in zip(*after, strict=True))


def _streams() -> list[tuple[torch.Tensor, ...]]:
    """Return calls with nothing, some and more than enough of a past."""
    return [
        (
            torch.randn(5, 1, 16),
            torch.full((2, 1), steps),
            *(torch.randn(2, length, 1, 16) for length in (3, 6, 6)),
        )
        for steps in (4, 0, 8, 20, 0)
    ]


class Wav2Letter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(13, 24, 11, 2, 5),
            nn.ReLU(),
            nn.Conv1d(24, 24, 7, 1, 3),
            nn.ReLU(),
            nn.Conv1d(24, 28, 1),
            nn.ReLU(),
        )

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        letters = F.log_softmax(self.body(features), dim=1)
        return letters, letters.argmax(1)


class Spectrogram(Holding, window=lambda: torch.hann_window(64), bands=lambda: torch.rand(33, 12)):
    """Power in bands of frequency, and the wave back from its spectrum."""

    def forward(self, wave: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spectrum = torch.stft(wave, 64, 16, window=self.window, return_complex=True)
        parts = torch.view_as_real(spectrum)
        power = parts.pow(2).sum(-1)
        levels = torch.log(power.transpose(1, 2) @ self.bands + 1e-6)
        back = torch.fft.irfft(spectrum[:, :, 3], n=64)
        return levels, back


class Tacotron(nn.Module):
    """Attention that listens to where it was before: location-sensitive, frame by frame."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(30, width)
        self.cell = nn.GRUCell(width + 5, width)
        self.place = nn.Conv1d(1, 4, 5, padding=2)
        self.query, self.key, self.spot = nn.Linear(width, 8), nn.Linear(width, 8), nn.Linear(4, 8)
        self.score, self.frame = nn.Linear(8, 1), nn.Linear(2 * width, 5)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        memory = self.words(text)
        keys = self.key(memory)
        state = torch.zeros(text.shape[0], memory.shape[-1])
        frame, seen = torch.zeros(text.shape[0], 5), torch.zeros(text.shape)
        context = memory.mean(1)
        frames = []
        for _ in range(4):
            state = self.cell(torch.cat([context, frame], -1), state)
            spots = self.spot(self.place(seen.unsqueeze(1)).transpose(1, 2))
            hidden = torch.tanh(self.query(state).unsqueeze(1) + keys + spots)
            weights = self.score(hidden).squeeze(-1).softmax(-1)
            seen = seen + weights
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            frame = self.frame(torch.cat([state, context], -1))
            frames.append(frame)
        return torch.stack(frames, 1)


class StreamingFilter(nn.Module):
    """A causal convolution that keeps the last samples from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("past", torch.zeros(1, 3, 6))
        self.first = nn.Conv1d(3, 4, 4, dilation=2)
        self.gate = nn.Conv1d(4, 8, 1)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([self.past, samples], -1)
        self.past.copy_(whole[..., -6:])
        return F.glu(self.gate(self.first(whole)), 1)


PROGRAMS = (
    Program("conv_tasnet", ConvTasNet, normal(2, 120)),
    Program("emformer", Emformer, _streams, tags="dynamic shared-weights"),
    Program("wav2letter", Wav2Letter, normal(1, 13, 40)),
    Program("spectrogram", Spectrogram, normal(2, 200), atol=1e-3, tags="complex"),
    Program(
        "tacotron", Tacotron, drawn(lambda: (torch.randint(0, 30, (2, 7)),)), tags="shared-weights"
    ),
    Program(
        "streaming_filter", StreamingFilter, normal(1, 3, 10, repeat=4), tags="in-place stateful"
    ),
)
