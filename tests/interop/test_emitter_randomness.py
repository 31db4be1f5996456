"""Random operators draw new numbers in each call of the runtime, or are refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from lowerdeck.emitter import MissingKernelError, UnsupportedError, emit
from lowerdeck_zoo import Of, official

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


Body = Callable[[torch.Tensor], torch.Tensor]


def _in_cond(body: Body) -> Body:
    return lambda x: torch.cond(x.sum() > -1, lambda x: body(x) + x, lambda x: x + 1, (x,))


def _in_while_loop(body: Body) -> Body:
    def looped(x: torch.Tensor) -> torch.Tensor:
        first, second = torch.tensor(0), torch.zeros(2, *SHAPE)

        def turn(i: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> Any:
            return i + 1, torch.stack([rows[1], body(x)]), x.clone()

        return while_loop(lambda i, rows, x: i < 2, turn, (first, second, x))[1]

    return looped


def _in_map(body: Body) -> Body:
    return lambda x: map_rows(lambda row: body(row) + 0, torch.stack([x, x]))


def _in_scan(body: Body) -> Body:
    def scanned(x: torch.Tensor) -> torch.Tensor:
        rows = torch.stack([x, x])
        return scan(lambda kept, row: (kept + row, body(row) + kept * 0), x, rows, dim=0)[1]

    return scanned


INSIDE: dict[str, Callable[[Body], Body]] = {
    "cond": _in_cond,
    "cond in cond": lambda body: _in_cond(_in_cond(body)),
    "while_loop": _in_while_loop,
    "map": _in_map,
    "scan": _in_scan,
    "cond in map": lambda body: _in_map(_in_cond(body)),
}
# Of an input, of a constant, of nothing, and two of what is written in place.
BODIES = ("rand_like of an input", "rand_like of a constant", "randn", "dropout", "uniform_")
# torch cannot export a scan whose body takes a constant from outside.
NESTED = [
    (where, body)
    for where in INSIDE
    for body in BODIES
    if (where, body) != ("scan", "rand_like of a constant")
]


@pytest.mark.parametrize(("where", "body"), NESTED)
def test_each_turn_of_a_nested_graph_draws_anew(where: str, body: str, tmp_path: Path) -> None:
    program = emitted(INSIDE[where](FILLED[body]))
    program.save(tmp_path / "model.pte")
    for file in (program.to_bytes(), tmp_path / "model.pte"):
        outcome = official.run(file, [official.Call((torch.zeros(SHAPE),))] * 2)
        assert isinstance(outcome, official.Ran), outcome
        turns = [turn for (found,) in outcome.outputs for turn in found.view(-1, *SHAPE)]
        assert len(turns) == (2 if where in ("cond", "cond in cond") else 4)
        for number, turn in enumerate(turns):
            assert all(not torch.equal(turn, other) for other in turns[:number])


@pytest.mark.parametrize("where", INSIDE)
def test_what_no_kernel_draws_is_refused_inside_nested_graphs(where: str) -> None:
    with pytest.raises(MissingKernelError, match=r"aten\.poisson"):
        emitted(INSIDE[where](lambda x: torch.poisson(x + 8)))
