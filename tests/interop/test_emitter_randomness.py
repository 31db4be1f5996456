"""Random operators draw new numbers in each call of the runtime, or are refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.emitter import MissingKernelError, UnsupportedError, emit
from tests.interop import official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

SHAPE = (40, 50)
HALF = torch.full(SHAPE, 0.5)
FILLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda x: torch.rand(SHAPE),
    "randn": lambda x: torch.randn(SHAPE),
    "rand_like of a constant": lambda x: torch.rand_like(HALF),
    "rand_like of an input": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(HALF),
    "normal": lambda x: torch.normal(HALF, HALF * 3),
    "normal of a number and a tensor": lambda x: torch.normal(2.0, HALF * 3),
    "normal of a tensor and a number": lambda x: torch.normal(HALF, 4.0),
    "normal of numbers": lambda x: torch.normal(2.0, 3.0, SHAPE),
    "normal_": lambda x: torch.empty(SHAPE).normal_(-1.0, 2.0),
    "uniform_": lambda x: x.clone().uniform_(-3.0, 5.0),
    "bernoulli": lambda x: torch.bernoulli(HALF),
    "bernoulli_": lambda x: torch.empty(SHAPE).bernoulli_(0.25),
    "exponential_": lambda x: torch.empty(SHAPE).exponential_(2.0),
    "randint": lambda x: torch.randint(-3, 9, SHAPE).float(),
    "dropout": lambda x: nn.functional.dropout(x + 1, 0.25, True),
    "dropout of a constant": lambda x: nn.functional.dropout(HALF, 0.25, True),
    "alpha dropout": lambda x: nn.functional.alpha_dropout(x, 0.25, True),
    "gumbel softmax": lambda x: nn.functional.gumbel_softmax(x, dim=0) * 40,
}
REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "poisson": (lambda x: torch.poisson(HALF), "aten.poisson"),
    "multinomial": (lambda x: torch.multinomial(HALF, 2), "aten.multinomial"),
    "binomial": (lambda x: torch.binomial(HALF * 8, HALF), "aten.binomial"),
    "gamma": (lambda x: torch._standard_gamma(HALF), "aten._standard_gamma"),
    "dirichlet": (lambda x: torch._sample_dirichlet(HALF), "aten._sample_dirichlet"),
    "randperm": (lambda x: torch.randperm(9), "aten.randperm"),
    "cauchy": (lambda x: torch.empty(SHAPE).cauchy_(), "aten.cauchy"),
    "geometric": (lambda x: torch.empty(SHAPE).geometric_(0.5), "aten.geometric"),
    "log_normal": (lambda x: torch.empty(SHAPE).log_normal_(), "aten.log_normal"),
    "randint_like": (lambda x: torch.randint_like(HALF, 9), "aten.randint_like"),
    "rrelu": (lambda x: nn.functional.rrelu(x, training=True), "aten.rrelu"),
    "attention with dropout": (
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        "dropout 0.5 is random",
    ),
}


class Of(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def emitted(function: Callable[[torch.Tensor], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return emit(torch.export.export(Of(function).train(), (torch.zeros(SHAPE),)))


@pytest.mark.parametrize("name", FILLED)
def test_each_call_draws_other_numbers_of_the_same_distribution(name: str, tmp_path: Path) -> None:
    function, x = FILLED[name], torch.zeros(SHAPE)
    program = emitted(function)
    program.save(tmp_path / "model.pte")
    calls = [official.Call((x,))] * 3
    outcomes = [official.run(program.to_bytes(), calls)]
    outcomes.append(official.run(tmp_path / "model.pte", calls))
    drawn = [function(x) for _ in range(3)]
    for outcome in outcomes:
        assert isinstance(outcome, official.Ran), outcome
        found = [values[0] for values in outcome.outputs]
        assert not torch.equal(found[0], found[1])
        assert not torch.equal(found[1], found[2])
        ours, theirs = torch.stack(found), torch.stack(drawn)
        assert ours.dtype == theirs.dtype
        assert ours.isfinite().all()
        # 6,000 numbers each: means and spreads are known to some 2 %.
        spread = theirs.std()
        assert (ours.mean() - theirs.mean()).abs() < 0.15 * spread
        assert (ours.std() / spread - 1).abs() < 0.15


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_draws_is_refused_by_name(name: str) -> None:
    function, told = REFUSED[name]
    with pytest.raises((MissingKernelError, UnsupportedError), match=told):
        emitted(function)


def test_two_draws_are_two() -> None:
    outcome = official.run(
        emitted(lambda x: torch.rand(SHAPE) - torch.rand(SHAPE)).to_bytes(),
        [official.Call((torch.zeros(SHAPE),))],
    )
    assert isinstance(outcome, official.Ran), outcome
    assert outcome.outputs[0][0].abs().max() > 0.1
