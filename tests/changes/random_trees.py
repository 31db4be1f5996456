"""Random trees of modules: shared, stateful, specialised, branching, in regions of other modes."""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree
from unflatten_zoo.case import Case, Named

from tests.changes.random_leaves import CONTROL_FLOW, SIZE, Leaf, Pair, branch

_NAMES = ("layer1", "layer10", "fc", "graph", "block", "meta", "input", "id", "code", "max", "x")


class Tree(nn.Module):
    """Calls its children by a random program, some of them more than once.

    A program is the same at each call: only arguments differ.
    """

    def __init__(
        self, rng: random.Random, depth: int, pool: list[nn.Module], *, odd: bool = False
    ) -> None:
        super().__init__()
        self.odd = odd
        self.paths: list[tuple[str, ...]] = []
        if rng.random() < 0.25:
            self.register_buffer("seen", torch.zeros(SIZE), persistent=rng.random() < 0.5)
        if rng.random() < 0.25:
            self.gain = nn.Parameter(torch.randn(SIZE))
        for number in range(rng.randint(1, 3)):
            name = rng.choice(_NAMES)
            # Names that are prefixes of others, and now and then the plain name.
            name += str(number) if hasattr(self, name) or rng.random() < 0.8 else ""
            self._add(name, rng, depth, pool)
        steps = ALL_STEPS if odd else STEPS
        self.steps = [
            (rng.choice(self.paths), rng.choices(list(steps), [w for w, _ in steps.values()])[0])
            for _ in range(rng.randint(1, 4))
        ]
        self.results = rng.choice(["tensor"] * 6 + ["tuple", "dict", "pair"])
        _tie(rng, pool)

    def _add(self, name: str, rng: random.Random, depth: int, pool: list[nn.Module]) -> None:
        made = rng.random()
        if made < 0.1:
            children: Any = nn.ModuleList([self._child(rng, depth, pool) for _ in range(2)])
            self.paths += [(name, "0"), (name, "1")]
        elif made < 0.15:
            children = nn.ModuleDict({key: self._child(rng, depth, pool) for key in ("a", "b1")})
            self.paths += [(name, "b1"), (name, "a")]
        elif made < 0.2:
            children = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))
            self.paths += [(name,), (name, "2"), (name, "1")]
        else:
            children = self._child(rng, depth, pool)
            self.paths.append((name,))
        setattr(self, name, children)

    def _child(self, rng: random.Random, depth: int, pool: list[nn.Module]) -> nn.Module:
        if pool and rng.random() < 0.2:
            return rng.choice(pool)
        child: nn.Module = (
            Tree(rng, depth - 1, pool, odd=self.odd)
            if depth > 0 and rng.random() < 0.6
            else Leaf(rng, odd=self.odd)
        )
        pool.append(child)
        return child

    def forward(
        self,
        x: Tensor,
        extra: Tensor | None = None,
        *,
        max: float = 1.0,  # noqa: A002
        flip: bool = False,
        id: Any = None,  # noqa: A002
    ) -> Any:
        if hasattr(self, "seen"):
            self.seen.lerp_(x.detach().mean(0), 0.5)
        if hasattr(self, "gain"):
            x = x * self.gain
        for path, step in self.steps:
            x = ALL_STEPS[step][1](self, self.child(path), x)
        if extra is not None:
            x = x + extra
        if flip:
            x = x.flip(0)
        # Bounded, so that residual calls of each other do not end in infinity.
        x = nn.functional.softsign(x) * max
        x = x if id is None else x / id
        if self.results == "tuple":
            return x, None, [x.sum(0)]
        if self.results == "dict":
            return {"result": x, "more": (None, x.mean())}
        return Pair(x, {"none": None, "square": x * x}) if self.results == "pair" else x

    def child(self, path: tuple[str, ...]) -> Any:
        """Return the child at a path."""
        found: Any = getattr(self, path[0])
        for name in path[1:]:
            found = found[int(name) if name.isdecimal() else name]
        return found


def _tie(rng: random.Random, pool: list[nn.Module]) -> None:
    """Let two layers hold one parameter or one buffer, now and then."""
    leaves: list[Any] = [module for module in pool if isinstance(module, Leaf)]
    if len(leaves) < 2 or rng.random() < 0.8:
        return
    one, two = rng.sample(leaves, 2)
    for held in ("_parameters", "_buffers"):
        ours, theirs = getattr(one, held), getattr(two, held)
        for name in ours.keys() & theirs.keys():
            same = isinstance(ours[name], Tensor) and isinstance(theirs[name], Tensor)
            if same and ours[name].shape == theirs[name].shape and one.kind == two.kind:
                theirs[name] = ours[name]


def tensor_of(result: Any) -> Any:
    """Return the tensor of a child's result, whatever its structure."""
    if isinstance(result, tuple):
        return result[0] + result[2][0]
    if isinstance(result, dict):
        return result["result"] - result["more"][1]
    return result.first - result.second["square"] if isinstance(result, Pair) else result


def _accepts(child: Any) -> bool:
    return isinstance(child, (Leaf, Tree))


def _size(tree: Any, child: Any, x: Tensor) -> Any:
    return tensor_of(child(x, id=x.shape[0]) if _accepts(child) else child(x / x.shape[0]))


def _number(tree: Any, child: Any, x: Tensor) -> Any:
    return tensor_of(child(id=x.abs().sum() + 1, input=x) if isinstance(child, Leaf) else child(x))


def _no_grad(tree: Any, child: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = tensor_of(child(x)).sigmoid()
    return x * y


def _nested_modes(tree: Any, child: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = x.sigmoid()
        with torch.enable_grad():
            z = tensor_of(child(x))
        y = y + tensor_of(child(x)).tanh()
    return z + y


def _autocast(tree: Any, child: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = tensor_of(child(x))
    return y.float()


def _branch_calls(tree: Any, child: Any, x: Tensor) -> Any:
    if isinstance(child, (nn.Linear, nn.Sequential)) or getattr(child, "kind", "") == "linear":
        return branch(x.sum() > 0, lambda x: child(x).sin(), torch.cos, x)
    return tensor_of(child(x))


def _reads_state(tree: Any, child: Any, x: Tensor) -> Any:
    x = tensor_of(child(x))
    state = getattr(child, "state", None)
    return x - state if isinstance(state, Tensor) and state.is_floating_point() else x


def _reads_state_before(tree: Any, child: Any, x: Tensor) -> Any:
    state = getattr(child, "state", None)
    before = state.clone() if isinstance(state, Tensor) else x.mean()
    return tensor_of(child(x)) + before


def _writes_state(tree: Any, child: Any, x: Tensor) -> Any:
    x = tensor_of(child(x))
    if getattr(child, "kind", "") in {"count", "old", "row"}:
        child.state.mul_(0.5)
    return x


def _writes_result(tree: Any, child: Any, x: Tensor) -> Any:
    y = tensor_of(child(x)) + 1
    y[:, :2].mul_(2)
    y.view(-1)[0] = 0.25
    return y


def _interleaved(tree: Any, child: Any, x: Tensor) -> Any:
    other = tree.child(tree.paths[0])
    y, z = tensor_of(child(x)), tensor_of(other(x))
    return tensor_of(child(z)) + y


def _half(tree: Any, child: Any, x: Tensor) -> Any:
    """Compute with the child's parameters, not by a call of it."""
    for weight in child.parameters():
        if weight.shape[-1:] == (SIZE,):
            x = x + weight.reshape(-1, SIZE)[0]
    return x


Step = Callable[[Any, Any, Tensor], Any]

STEPS: dict[str, tuple[float, Step]] = {
    "plain": (4, lambda tree, child, x: tensor_of(child(x))),
    "extra": (
        2,
        lambda tree, child, x: tensor_of(
            child(x, x.tanh()) if _accepts(child) else child(x.tanh())
        ),
    ),
    "keyword": (
        1.5,
        lambda tree, child, x: tensor_of(child(x, max=0.5) if _accepts(child) else child(x)),
    ),
    "flag": (
        1,
        lambda tree, child, x: tensor_of(child(x, flip=True) if _accepts(child) else child(-x)),
    ),
    "size": (0.7, _size),
    "number": (0.7, _number),
    "residual": (2, lambda tree, child, x: x + tensor_of(child(x))),
    "no grad": (1.5, _no_grad),
    "nested modes": (0.7, _nested_modes),
    "autocast": (0.7, _autocast),
    "branching": (
        0.5,
        lambda tree, child, x: tensor_of(child(branch(x.sum() > 0, torch.sin, torch.cos, x))),
    ),
    "branch calls": (0.3, _branch_calls),
    "reads state": (1.5, _reads_state),
    "reads state before": (0.7, _reads_state_before),
    "writes state": (0.7, _writes_state),
    "writes result": (0.7, _writes_result),
    "interleaved": (0.7, _interleaved),
    "half": (0.5, _half),
}
"""How often each step of a tree's program occurs, and what it does."""


def _reads_kept(tree: Any, child: Any, x: Tensor) -> Any:
    y = tensor_of(child(x))
    if getattr(child, "kind", "").startswith("keeps"):
        y = y * child.kept
    return y


def _reads_after(tree: Any, child: Any, x: Tensor) -> Any:
    """Read the argument after the call, which may have written it."""
    y = x.sin()
    return tensor_of(child(y)) - y


def _writes_given(tree: Any, child: Any, x: Tensor) -> Any:
    """Write what the child was given, and may have returned."""
    y = x.sin()
    z = tensor_of(child(y))
    y.mul_(0.5)
    return z * 2 + y


def _writes_returned(tree: Any, child: Any, x: Tensor) -> Any:
    """Write what the child returned, which may be what it was given."""
    y = x.sin()
    z = tensor_of(child(y))
    z.mul_(0.5)
    return z + y


def _other_weights(tree: Any, child: Any, x: Tensor) -> Any:
    if getattr(child, "kind", "") != "linear":
        return tensor_of(child(x))
    return torch.func.functional_call(child, {"weight": child.weight * 0.5}, x)


ODD_STEPS: dict[str, tuple[float, Step]] = {
    "reads kept": (3, _reads_kept),
    "reads after": (2, _reads_after),
    "writes given": (1.5, _writes_given),
    "writes returned": (1.5, _writes_returned),
    "other weights": (1, _other_weights),
}
"""Steps that read or write what a child is given, returns or keeps, or that give it weights."""

ALL_STEPS = {**STEPS, **ODD_STEPS}


class Plain(nn.Module):
    """A tree with one argument, which it may write."""

    def __init__(self, tree: Tree, rng: random.Random) -> None:
        super().__init__()
        self.tree = tree
        self.writes = rng.random() < 0.25
        self.returns = rng.random() < 0.25

    def forward(self, input: Tensor) -> Any:  # noqa: A002
        x = self.tree(input)
        for module in self.tree.modules():
            # Export refuses what is left.
            vars(module).pop("kept", None)
        if self.writes:
            input.add_(1)
        return {"x": x, "input": input, "none": None} if self.returns else x

    def arguments(self, tensor: Callable[[], Tensor]) -> Arguments:
        return (tensor(),), {}


class Structured(Plain):
    """Takes containers, None, constants and an own class."""

    def forward(  # type: ignore[override]
        self, x: Tensor, options: dict[str, Any], nothing: None, *, pair: Pair
    ) -> Any:
        y = super().forward(x * options["scale"][0] + pair.first * pair.second[1])
        if self.writes:
            options["scale"][0].mul_(2)
        return y, options["scale"]

    def arguments(self, tensor: Callable[[], Tensor]) -> Arguments:
        options = {"scale": [tensor(), None], "unused": tensor()}
        return (tensor(), options, None), {"pair": Pair(tensor(), (True, 3))}


class Builtins(Plain):
    """Takes arguments named like what Python has built in, by keyword in another order."""

    def forward(  # type: ignore[override]
        self,
        input: Tensor,  # noqa: A002
        id: float = 1.0,  # noqa: A002
        *,
        type: Tensor,  # noqa: A002
        max: Tensor,  # noqa: A002
    ) -> Any:
        return super().forward(input + type * id - max)

    def arguments(self, tensor: Callable[[], Tensor]) -> Arguments:
        return (tensor(), 2.0), {"max": tensor(), "type": tensor()}


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def random_case(seed: int, depth: int = 3, cost: int = 60, *, odd: bool = False) -> Case:
    """Return a random model with three calls.

    Args:
        seed: What both are made of.
        depth: How many levels of trees there may be below the first.
        cost: How many calls of modules there may be; one choice or loop counts as six.
        odd: Whether modules write their arguments, keep values for others, and the like.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    while True:
        tree = Tree(rng, rng.randint(0, depth), [], odd=odd)
        model = rng.choice([Plain, Plain, Structured, Builtins])(tree, rng)
        training, dynamic = rng.random() < 0.5, rng.random() < 0.25
        rows = tuple((3 + (number if dynamic else 0), number) for number in range(3))

        def draw(rows: int, number: int, model: Plain = model) -> tuple[Any, ...]:
            generator = torch.Generator().manual_seed(1000 * seed + number)
            args, kwargs = model.arguments(lambda: torch.randn(rows, SIZE, generator=generator))
            return (*args, Named(kwargs))

        case = Case(
            f"seed {seed}",
            lambda model=model: model,
            draw,
            rows,
            _shapes(model, draw(3, 0)) if dynamic else None,
            training,
        )
        if _cost(model.train(training), draw(3, 0)) <= cost:
            return case


def _shapes(model: Plain, drawn: tuple[Any, ...]) -> Any:
    rows = Dim("rows", min=2, max=64)

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, Pair):
            return [shape(leaf.first), pytree.tree_map(shape, leaf.second)]
        return {0: rows} if isinstance(leaf, Tensor) else None

    names = list(inspect.signature(model.forward).parameters)
    named = {**dict(zip(names, drawn[:-1], strict=False)), **drawn[-1]}
    return pytree.tree_map(shape, named, is_leaf=lambda leaf: isinstance(leaf, Pair))


def _cost(model: nn.Module, drawn: tuple[Any, ...]) -> float:
    model = copy.deepcopy(model)
    calls: list[int] = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append(1))
    CONTROL_FLOW.clear()
    try:
        model(*drawn[:-1], **drawn[-1])
    except RuntimeError:
        # Eager itself cannot run it: autocast gave some operator two types.
        return math.inf
    return len(calls) + 6 * len(CONTROL_FLOW)
