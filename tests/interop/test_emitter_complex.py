"""Complex numbers that no kernel computes are refused; zoo programs have those that are right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowerdeck.emitter import MissingKernelError, emit
from lowerdeck_zoo.models.complex_numbers import Function, Pairs

pytestmark = pytest.mark.filterwarnings("ignore")

REFUSED: dict[str, Function] = {
    "power": lambda c, _d, _y: c**3,
    "comparison": lambda c, d, _: c == d,
    "root": lambda c, _d, _y: c.sqrt(),
    "triangle": lambda c, _d, _y: c.tril(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_computes_on_complex_numbers_is_refused(name: str) -> None:
    args: tuple[Tensor, ...] = (torch.randn(6, 8, 2), torch.randn(6, 8, 2))
    exported = torch.export.export(Pairs([REFUSED[name]]), args)
    with pytest.raises(MissingKernelError, match="complex"):
        emit(exported)
