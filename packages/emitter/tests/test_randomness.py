"""Random operators draw new numbers in each call and each turn of a nested graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emitter_running import results  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from lowerdeck.emitter import EmittedProgram, MissingKernelError, emit
from lowerdeck_zoo import Of

pytestmark = pytest.mark.filterwarnings("ignore")

Body = Callable[[Tensor], Tensor]
SHAPE = (40, 50)
HALF = torch.full(SHAPE, 0.5)
X = torch.zeros(SHAPE)
FILLED: dict[str, Body] = {
    "rand": lambda x: torch.rand(SHAPE),
    "randn": lambda x: torch.randn(SHAPE),
    "rand_like of a constant": lambda x: torch.rand_like(HALF),
    "rand_like of an input": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(HALF),
    "normal_": lambda x: torch.empty(SHAPE).normal_(-1.0, 2.0),
    "uniform_": lambda x: x.clone().uniform_(-3.0, 5.0),
    "bernoulli": lambda x: torch.bernoulli(HALF),
    "bernoulli_": lambda x: torch.empty(SHAPE).bernoulli_(0.25),
    "randint": lambda x: torch.randint(-3, 9, SHAPE).float(),
    "dropout": lambda x: nn.functional.dropout(x + 1, 0.25, True),
    "dropout of a constant": lambda x: nn.functional.dropout(HALF, 0.25, True),
    "alpha dropout": lambda x: nn.functional.alpha_dropout(x, 0.25, True),
    "a difference of two": lambda x: torch.rand(SHAPE) - torch.rand(SHAPE),
}


def emitted(function: Callable[[Tensor], Any]) -> EmittedProgram:
    return emit(torch.export.export(Of(function).train(), (X,)))


@pytest.mark.parametrize("name", FILLED)
def test_each_call_draws_other_numbers_of_the_same_distribution(name: str) -> None:
    torch.manual_seed(0)
    found = [values[0] for values in results(emitted(FILLED[name]), [("forward", [X])] * 3)]
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    ours, theirs = torch.stack(found), torch.stack([FILLED[name](X) for _ in range(3)])
    assert ours.dtype == theirs.dtype
    assert ours.isfinite().all()
    # 6,000 numbers each: means and spreads are known to some 2 %.
    spread = theirs.std()
    assert (ours.mean() - theirs.mean()).abs() < 0.15 * spread
    assert (ours.std() / spread - 1).abs() < 0.15


def _in_cond(body: Body) -> Body:
    return lambda x: torch.cond(x.sum() > -1, lambda x: body(x) + x, lambda x: x + 1, (x,))


def _in_while_loop(body: Body) -> Body:
    def turn(i: Tensor, rows: Tensor, x: Tensor) -> Any:
        return i + 1, torch.stack([rows[1], body(x) + x]), x.clone()

    def looped(x: Tensor) -> Any:
        start = (torch.tensor(0), torch.zeros(2, *SHAPE), x)
        loop: Any = while_loop
        return loop(lambda i, rows, x: i < 2, turn, start)[1]

    return looped


def _in_map(body: Body) -> Body:
    rows: Any = map_rows
    return lambda x: rows(lambda row: body(row) + 0, torch.stack([x, x]))


def _in_scan(body: Body) -> Body:
    def scanned(x: Tensor) -> Any:
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
def test_each_turn_of_a_nested_graph_draws_anew(where: str, body: str) -> None:
    outputs = results(emitted(INSIDE[where](FILLED[body])), [("forward", [X])] * 2)
    turns = [turn for (found,) in outputs for turn in found.view(-1, *SHAPE)]
    assert len(turns) == (2 if where in ("cond", "cond in cond") else 4)
    for number, turn in enumerate(turns):
        assert all(not torch.equal(turn, other) for other in turns[:number])


@pytest.mark.parametrize("where", INSIDE)
def test_what_no_kernel_draws_is_refused_inside_nested_graphs(where: str) -> None:
    with pytest.raises(MissingKernelError, match=r"aten\.poisson"):
        emitted(INSIDE[where](lambda x: torch.poisson(x + 8)))
