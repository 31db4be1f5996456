"""Tables that a program computes of little, and that a payload computes again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from case_making import Case, case  # type: ignore[import-not-found]
from torch import Tensor, nn

TOKENS, WIDTH = 128, 64


class Rotary(nn.Module):
    """Turns each token by its position, in halves of its width as language models do."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        exponents = torch.arange(0, WIDTH, 2).float() / WIDTH
        self.register_buffer("frequencies", 10_000.0**-exponents)

    def forward(self, x: Tensor) -> Tensor:
        """Return the turned tokens."""
        positions = torch.arange(x.shape[-2]).float()
        angles = positions[:, None] * self.get_buffer("frequencies")
        angles = torch.cat([angles, angles], -1)[None, None]
        left, right = x.chunk(2, -1)
        turned = torch.cat([-right, left], -1)
        return x * (angles.cos() * self.factor) + turned * (angles.sin() * self.factor)


class Places(nn.Module):
    """Adds to each place of an image what its row and its column say, together made narrower."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.flat = flat
        torch.manual_seed(0)
        self.narrow = nn.Conv2d(8, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the image, or its places in a row."""
        height, width = x.shape[-2:]
        parts = torch.arange(1.0, 5.0)[:, None, None]
        rows = (torch.arange(height)[:, None] / parts).sin().expand(4, height, width)
        columns = (torch.arange(width)[None] / parts).cos().expand(4, height, width)
        added: Tensor = self.narrow(torch.cat([rows, columns])[None])
        if self.flat:
            x, added = x.flatten(2), added.flatten(2)
            return x.transpose(1, 2) + added.transpose(1, 2)
        return F.relu(x + added)


def tables() -> Iterator[Case]:
    """Yield programs that hold such tables, and some that only look so."""
    tokens = (1, 2, TOKENS, WIDTH)
    yield case("rotary", lambda x, m: m(x), tokens, parts=(Rotary(),))
    yield case("rotary_scaled", lambda x, m: m(x), tokens, parts=(Rotary(1.25),))
    yield case("places", lambda x, m: m(x), (1, 12, 20, 24), parts=(Places(flat=False),))
    yield case("places_in_a_row", lambda x, m: m(x), (1, 12, 24, 24), parts=(Places(flat=True),))

    def far(x: Tensor) -> Tensor:
        """Use sines beyond those that the runtime has."""
        angles = torch.arange(1.0, TOKENS + 1)[:, None] * torch.tensor([1.0, 9e8]).repeat(32)
        return x + angles.sin()

    yield case("far_sines", far, tokens)

    for large in (-1e4, -1e9, torch.finfo(torch.float32).min):

        def masked(x: Tensor, large: float = large) -> Tensor:
            """Add what looks like its first row but for numbers that the mask's are far above."""
            table = torch.sin(torch.arange(float(TOKENS * WIDTH)).reshape(TOKENS, WIDTH))
            return x + torch.cat([torch.full((TOKENS, WIDTH // 2), large), table], 1)[:, :WIDTH]

        yield case(f"masked_by_{large:.0e}", masked, tokens)

    def small(x: Tensor) -> Tensor:
        rows = torch.arange(float(TOKENS))[:, None] / TOKENS
        return x * (rows - torch.arange(float(WIDTH))[None] / WIDTH)

    yield case("factors_that_are_a_sum", small, tokens)

    def nearly(x: Tensor) -> Tensor:
        table = torch.arange(TOKENS)[:, None] + torch.arange(WIDTH)[None].float()
        return x * (table + torch.eye(TOKENS, WIDTH))

    yield case("nearly_a_sum", nearly, tokens)
