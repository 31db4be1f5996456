"""Writes through chains of views, among them those that storage tells and not the view before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.decompose import DecomposeError, decompose, explain

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


def _strays(chain: Sequence[str]) -> bool:
    """Return whether a chain reads storage as elements of another type than its base has."""
    last = max(i for i, name in enumerate(chain) if name in BY_STORAGE)
    return any(name in OF_DTYPE for name in chain[:last])


def _export(base: Any, chains: Sequence[Sequence[str]]) -> Any:
    model = Writing(base, chains)
    return torch.export.export(model, tuple(_input() for _ in chains))


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_nothing_is_lost_that_is_written_through_a_chain_of_views(base: Any, length: int) -> None:
    # Of three views, those that torch's way refuses: as_strided comes after others.
    known = [
        chain
        for chain in _possible(base, length)
        if length < 3 or any(name in BY_STORAGE for name in chain[1:])
    ]
    told = [chain for chain in known if not (set(chain) & set(BY_STORAGE)) or not _strays(chain)]
    assert len(told) > 7
    program = _export(base, told)
    assert explain(program).reason is None
    found = decompose(program).module()(*(_input() for _ in told))
    expected = Writing(base, told)(*(_input() for _ in told))
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        # As numbers: views of other types give NaNs.
        assert one.tolist() == other.tolist() or one.isnan().any(), told[index // 3]


@pytest.mark.parametrize(
    "chain", [("integers", "first two"), ("rest", "integers", "rows of two", "steps")]
)
def test_what_shows_other_elements_than_its_parent_is_not_written(chain: Any) -> None:
    program = _export(torch.clone, [chain])
    for ask in (decompose, explain):
        with pytest.raises(DecomposeError, match="writes through an as_strided of a view"):
            ask(program)


def test_what_does_not_fill_its_storage_is_not_written_by_storage() -> None:
    class Between(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.as_strided((4,), (1,), 0).add_(1)
            return x.as_strided((4,), (1,), 0) * 2

    program = torch.export.export(Between(), (_input()[:, ::2],))
    with pytest.raises(DecomposeError, match="writes through an as_strided"):
        decompose(program)
