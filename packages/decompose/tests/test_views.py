"""Writes through chains of views, among them those that storage tells and not the view before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.decompose import decompose, explain

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

View = Callable[[torch.Tensor], torch.Tensor]

BY_STORAGE: dict[str, View] = {
    "first two": lambda x: x.as_strided((2,), (1,), 0),
    "rows of two": lambda x: x.as_strided((2, 2), (3, 1), 1),
    "where it begins": lambda x: x.as_strided((2,), (2,)),
}
PLAIN: dict[str, View] = {
    "rest": lambda x: x[1:],
    "steps": lambda x: x[..., ::2],
    "transposed": lambda x: x.transpose(0, -1),
    "flat": lambda x: x.view(-1),
    "one of several": lambda x: x.unbind(0)[1],
    "diagonal": lambda x: x.diagonal(),
    "with one more": lambda x: x.unsqueeze(0),
}
OF_DTYPE: dict[str, View] = {
    "integers": lambda x: x.view(torch.int32),
    "shorter integers": lambda x: x.view(torch.int16),
    "pairs": lambda x: torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)),
    "imaginary": lambda x: torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).imag,
}
EVERY = {**BY_STORAGE, **PLAIN, **OF_DTYPE}

BASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "new": torch.clone,
    "transposed": lambda x: x.mT.contiguous().mT,
    "input": lambda x: x,
}


class Writing(nn.Module):
    """Writes each of its bases through a chain of views, and reads both."""

    def __init__(self, base: Any, chains: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.base = base
        self.chains = chains

    def forward(self, *given: torch.Tensor) -> Any:
        results = []
        for x, chain in zip(given, self.chains, strict=True):
            whole = shown = self.base(x)
            for name in chain:
                shown = EVERY[name](shown)
            before = whole + 0
            shown.add_(1)
            whole.mul_(2)
            results += [before, whole.clone(), shown.clone()]
        return results


def _input() -> torch.Tensor:
    return torch.arange(1.0, 25.0).view(4, 6)


def _possible(base: Any, length: int) -> Iterator[Sequence[str]]:
    # Steps that are coprime to the number of views, so that each is at each place.
    chains = list(product(EVERY, repeat=length))
    for chain in chains[:: (1, 3, 41)[length - 1]]:
        try:
            Writing(base, [chain])(_input())
        except (RuntimeError, IndexError, TypeError):
            continue
        yield chain


def _export(base: Any, chains: Sequence[Sequence[str]]) -> Any:
    model = Writing(base, chains)
    return torch.export.export(model, tuple(_input() for _ in chains))


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_nothing_is_lost_that_is_written_through_a_chain_of_views(base: Any, length: int) -> None:
    chains = [
        chain
        for chain in _possible(base, length)
        if BY_STORAGE.keys().isdisjoint(chain[1:])
        # A view of the input's storage shows what torch.export cannot tell either.
        and (base is torch.clone or chain[0] not in BY_STORAGE)
    ]
    assert len(chains) >= 7
    program = _export(base, chains)
    assert explain(program).reason is None
    found = decompose(program).module()(*(_input() for _ in chains))
    expected = Writing(base, chains)(*(_input() for _ in chains))
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        # As numbers: views of other types give NaNs.
        assert one.tolist() == other.tolist() or one.isnan().any(), chains[index // 3]


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        (("integers", "first two"), "writes through an as_strided of a view"),
        (("rest", "integers", "rows of two", "steps"), "on a tensor that has a storage offset"),
    ],
)
def test_a_write_through_as_strided_of_a_view_goes_torchs_way(chain: Any, reason: str) -> None:
    assert reason in str(explain(_export(torch.clone, [chain])).reason)
