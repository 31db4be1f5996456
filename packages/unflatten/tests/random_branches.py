"""Random branches on two sizes, of modules that are called alone with any others."""

from __future__ import annotations

import io
import random
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from lowerdeck.unflatten import InputConstraintError, export_preserving, unflatten

SIZES = (
    *("b", "t", "c", "b*t", "b+t", "b-1", "t+3", "t//2", "b*t//2", "(b+t)//2", "2*b", "3*t"),
    *("2*b*t", "b*b", "2*t+1", "b*t+b", "t%3+1", "b*(t-1)", "t*t-1", "b*c", "b+c", "b*t*c"),
    *("b*t+c", "c//3", "4*c+2*b", "min(b,t)", "max(b,2*t)", "t*3//2", "int(t*0.5)"),
)
"""How the sizes of what the module is given are computed of the model's own."""

NUMBERS = (
    *("n", "m", "n*m", "n+m", "n-m", "n//2", "m//2", "n%2", "m%3", "2*n", "n*n", "n//m"),
    *("m*3-n", "int(0.5*n)", "n/2", "max(n,m)", "min(n,2*m)", "n*m//3"),
)
"""What the module computes of these."""

RECORDED = {"b": 5, "t": 12, "c": 8}


class Inner(nn.Module):
    def __init__(self, condition: str) -> None:
        super().__init__()
        self.condition = compile(condition, condition, "eval")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        branch = eval(self.condition, {"n": x.shape[0], "m": y.shape[0]})
        return (x.mean() if branch else x.sum()) + y.mean()


class Model(nn.Module):
    def __init__(self, sizes: tuple[str, str], condition: str) -> None:
        super().__init__()
        self.inner, self.sizes = Inner(condition), sizes
        self.made = [compile(size, size, "eval") for size in sizes]

    def forward(self, x: Tensor, z: Tensor) -> Any:
        own = {"b": x.shape[0], "t": x.shape[1], "c": z.shape[0]}
        n, m = (eval(size, dict(own)) for size in self.made)
        return self.inner(x.new_ones(n) * x[0, 0], z.new_ones(m) * z[0])


def random_model(rng: random.Random) -> Model:
    condition = f"{rng.choice(NUMBERS)} {rng.choice(['<', '>', '==', '!=', '<=', '>='])} "
    condition += rng.choice([str(rng.randint(2, 40)), rng.choice(NUMBERS)])
    if rng.random() < 0.2:
        more = f"{rng.choice(NUMBERS)} {rng.choice('<>')} {rng.randint(2, 40)}"
        condition += f" {rng.choice(['and', 'or'])} {more}"
    return Model((rng.choice(SIZES), rng.choice(SIZES)), condition)


def random_program(rng: random.Random, model: Model) -> ExportedProgram:
    any_size = ({0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO})
    within = (
        {0: Dim("b", min=3, max=9), 1: Dim("t", min=4, max=20)},
        {0: Dim("c", min=3, max=30)},
    )
    how: Any = export if rng.random() < 0.4 else export_preserving
    args = torch.randn(RECORDED["b"], RECORDED["t"]), torch.randn(RECORDED["c"])
    program: ExportedProgram = how(
        model, args, dynamic_shapes=within if rng.random() < 0.4 else any_size
    )
    if rng.random() < 0.7:
        return program
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def check_seed(seed: int) -> tuple[int, int]:
    """Return how many calls were right, and how many were refused; any other is an error.

    Raises:
        AssertionError: A call of sizes that no size of 0 or 1 makes, which export takes for more,
            is another result than eager's; or what the whole's own sizes make is refused.
    """
    rng = random.Random(seed)
    model = random_model(rng)
    try:
        program = random_program(rng, model)
    except Exception:
        # Export's own errors are of many types: a bound that the model's branch breaks.
        return 0, 0
    made: Any = unflatten(program, preserve="all")
    some, few = range(192), range(2)
    made_of_few = chain(
        product(few, some, some), product(some, few, some), product(some, some, few)
    )
    left_out = {of_sizes(model, sizes) for sizes in made_of_few}
    right = refused = 0
    for n, m in product(range(2, 64), rng.sample(range(2, 64), 8)):
        x, y = torch.full((n,), 1.5), torch.full((m,), 0.5)
        try:
            found = made.inner(x, y)
        except InputConstraintError:
            refused += 1
            continue
        if (n, m) not in left_out:
            told = f"{seed}: {model.sizes}, {model.inner.condition.co_filename}, n={n}, m={m}"
            torch.testing.assert_close(found, model.inner(x, y), msg=told)
            right += 1
    for _ in range(20):
        b, t, c = rng.randint(3, 9), rng.randint(4, 20), rng.randint(3, 30)
        args = torch.randn(b, t), torch.randn(c)
        try:
            whole = made(*args)
        except InputConstraintError:
            continue
        torch.testing.assert_close(whole, model(*args))
        n, m = of_sizes(model, (b, t, c))
        given = torch.full((n,), 1.5), torch.full((m,), 0.5)
        torch.testing.assert_close(made.inner(*given), model.inner(*given))
        right += 1
    return right, refused


def of_sizes(model: Model, sizes: tuple[int, int, int]) -> tuple[int, int]:
    """Return what sizes of the whole make of the module's."""
    own: dict[str, Any] = dict(zip("btc", sizes, strict=True))
    n, m = (eval(size, own) for size in model.made)
    return n, m
