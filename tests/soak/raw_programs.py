"""Random models as users write them: views of views, slices written through, state, dynamic sizes.

A model is a list of steps over a pool of tensors, chosen while it runs in eager on examples (of
three sizes, where one is dynamic), and replayed by ``forward``, so that what ``torch.export``
records is the plain program that a user would have: nothing decomposed, nothing functional.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.map import map as map_rows

from tests.soak.more_steps import VIEW_MORE, WRITE_MORE, WRITE_TWO_MORE

Step = tuple[str, tuple[Any, ...]]
Pool = list[Tensor]
LARGEST = 50.0


@dataclass(slots=True)
class Method:
    """One method of a model.

    Attributes:
        steps: What it does, in order.
        returned: Positions in the pool of what it returns.
    """

    steps: list[Step] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)


_STATE = ("weight", "bias", "table", "row", "cache", "scratch", "columns", "spread", "window")
_ROW, _SPREAD = _STATE.index("row"), _STATE.index("spread")


class State(nn.Module):
    """The parameters and buffers that the methods of a model share."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        torch.manual_seed(rng.randrange(1 << 30))
        self.weight = nn.Parameter(torch.randn(3, 3) / 2, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(3) / 2, requires_grad=False)
        if rng.random() < 0.3:
            # Two names for one parameter.
            self.tied = self.weight
        self.register_buffer("table", torch.randn(4, 3))
        self.register_buffer("row", torch.randn(3))
        self.register_buffer("cache", torch.zeros(2, 4, 3))
        self.register_buffer("scratch", torch.randn(4, 3), persistent=False)
        # Not contiguous, as a model that was transposed on the way is.
        self.register_buffer("columns", torch.randn(3, 4).t())
        self.register_buffer("spread", torch.rand(3) + 0.5)
        # Memory with two names, one of them for a part, as packed weights and caches have.
        window = self.table[1:3] if rng.random() < 0.1 else torch.randn(2, 3)
        self.register_buffer("window", window)

    def pool(self) -> Pool:
        """Return what steps can use beside inputs: parameters, then buffers."""
        return [getattr(self, name) for name in _STATE]


class RawModel(nn.Module):
    """Replays one method over shared state.

    Args:
        state: The state.
        method: The method.
    """

    def __init__(self, state: State, method: Method) -> None:
        super().__init__()
        self.state = state
        self.method = method

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return what the method returns."""
        pool = [*self.state.pool(), *inputs]
        for name, args in self.method.steps:
            done = STEPS[name](pool, *args)
            if done is not None:
                pool.append(done)
        return tuple(pool[index] for index in self.method.returned)


def _in_place(change: Callable[..., Any]) -> Callable[..., None]:
    def step(pool: Pool, *args: Any) -> None:
        change(pool, *args)

    return step


def _keep(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


COMPUTE: dict[str, Callable[..., Tensor]] = {
    "sin": lambda p, a: p[a].sin(),
    "relu": lambda p, a: p[a].relu(),
    "scale": lambda p, a: p[a] * 0.5,
    "shift": lambda p, a: p[a] + 1,
    "gelu": lambda p, a: nn.functional.gelu(p[a]),
    "sigmoid": lambda p, a: p[a].sigmoid(),
    "clone": lambda p, a: p[a].clone(),
    "sum": lambda p, a: _keep(p[a].sum(-1, keepdim=True)),
    "mean": lambda p, a: p[a].mean(0, keepdim=True),
    "all": lambda p, a: _keep(p[a].sum()),
    "softmax": lambda p, a: p[a].softmax(-1),
    "linear": lambda p, a: _keep(nn.functional.linear(p[a], p[0], p[1])),
    "norm": lambda p, a: nn.functional.layer_norm(p[a], (p[a].shape[-1],)),
    "cumsum": lambda p, a: _keep(p[a].cumsum(0)),
    "positive": lambda p, a: torch.where(p[a] > 0, p[a], -p[a]),
    "half": lambda p, a: p[a].to(torch.float64).to(torch.float32),
    "flip": lambda p, a: p[a].flip(0),
    "batch_norm": lambda p, a: nn.functional.batch_norm(p[a], p[_ROW], p[_SPREAD].abs() + 0.1),
}
COMPUTE_TWO: dict[str, Callable[..., Tensor]] = {
    "add": lambda p, a, b: p[a] + p[b],
    "sub": lambda p, a, b: p[a] - p[b],
    "mul": lambda p, a, b: _keep(p[a] * p[b]),
    "maximum": lambda p, a, b: torch.maximum(p[a], p[b]),
    "matmul": lambda p, a, b: _keep(p[a] @ p[b]),
    "cat": lambda p, a, b: torch.cat([p[a], p[b]]),
    "stack": lambda p, a, b: torch.stack([p[a], p[b]]),
    "where": lambda p, a, b: torch.where(p[a] > p[b], p[a], p[b]),
    "einsum": lambda p, a, b: _keep(torch.einsum("ij,kj->ik", p[a], p[b])),
}
VIEW: dict[str, Callable[..., Tensor]] = {
    "select": lambda p, a: p[a][0],
    "select_last": lambda p, a: p[a][..., -1],
    "select_one": lambda p, a: p[a][1],
    "tail": lambda p, a: p[a][1:],
    "head": lambda p, a: p[a][:2],
    "every_other": lambda p, a: p[a][::2],
    "inner": lambda p, a: p[a][..., 1:],
    "transpose": lambda p, a: p[a].transpose(0, -1),
    "permute": lambda p, a: p[a].permute(*range(p[a].dim() - 1, -1, -1)),
    "flatten": lambda p, a: p[a].flatten(),
    "reshape": lambda p, a: p[a].reshape(-1, p[a].shape[-1]),
    "view": lambda p, a: p[a].view(-1),
    "unsqueeze": lambda p, a: p[a].unsqueeze(0),
    "squeeze": lambda p, a: p[a].squeeze(),
    "expand": lambda p, a: p[a].expand(2, *p[a].shape),
    "split": lambda p, a: p[a].split(2)[0],
    "chunk": lambda p, a: p[a].chunk(2, -1)[1],
    "unbind": lambda p, a: p[a].unbind(0)[1],
    "narrow": lambda p, a: p[a].narrow(-1, 0, 2),
    "diagonal": lambda p, a: p[a].diagonal(),
    "detach": lambda p, a: p[a].detach(),
    "alias": lambda p, a: p[a].view(p[a].shape),
    "same_type": lambda p, a: p[a].to(torch.float32),
    "contiguous": lambda p, a: p[a].contiguous(),
    "dropout": lambda p, a: nn.functional.dropout(p[a], 0.5, False),
    "as_row": lambda p, a: p[a].type_as(p[_ROW]),
    "trace": lambda p, a: torch.einsum("ij->ji", p[a]),
    "same": lambda p, a: p[a],
}
WRITE: dict[str, Callable[..., None]] = {
    "add_": _in_place(lambda p, a: p[a].add_(1)),
    "mul_": _in_place(lambda p, a: p[a].mul_(0.5)),
    "relu_": _in_place(lambda p, a: p[a].relu_()),
    "zero_": _in_place(lambda p, a: p[a].zero_()),
    "fill_": _in_place(lambda p, a: p[a].fill_(0.25)),
    "clamp_": _in_place(lambda p, a: p[a].clamp_(-1, 1)),
    "set_first": _in_place(lambda p, a: p[a].__setitem__(0, 0.5)),
    "set_inner": _in_place(lambda p, a: p[a].__setitem__((..., 0), 0.75)),
    "masked_fill_": _in_place(lambda p, a: p[a].masked_fill_(p[a] > 0.5, 0.5)),
    "set_mask": _in_place(lambda p, a: p[a].__setitem__(p[a] < -0.5, -0.5)),
    "put_rows": _in_place(lambda p, a: p[a].__setitem__(torch.tensor([1, 0]), 0.5)),
    "inplace_relu": _in_place(lambda p, a: nn.functional.relu(p[a], inplace=True)),
}
WRITE_TWO: dict[str, Callable[..., None]] = {
    "add_other_": _in_place(lambda p, a, b: p[a].add_(p[b])),
    "copy_": _in_place(lambda p, a, b: p[a].copy_(p[b])),
    "set_row": _in_place(lambda p, a, b: p[a].__setitem__(1, p[b])),
    "set_tail": _in_place(lambda p, a, b: p[a].__setitem__(slice(1, None), p[b])),
    "set_all": _in_place(lambda p, a, b: p[a].__setitem__(slice(None), p[b])),
    "index_copy_": _in_place(lambda p, a, b: p[a].index_copy_(0, torch.tensor([1]), p[b])),
    "index_add_": _in_place(lambda p, a, b: p[a].index_add_(0, torch.tensor([1]), p[b])),
    "lerp_": _in_place(lambda p, a, b: p[a].lerp_(p[b], 0.5)),
    "sub_out": _in_place(lambda p, a, b: torch.sub(p[a], p[b], out=p[a])),
}
BOTH: dict[str, Callable[..., Tensor]] = {
    # Their schemas do not tell that they write.
    "training_norm": lambda p, a: nn.functional.batch_norm(
        p[a], p[_ROW], p[_SPREAD], training=True, momentum=0.3
    ),
    "training_instance_norm": lambda p, a: nn.functional.instance_norm(
        p[a].transpose(-1, -2), p[_ROW], p[_SPREAD], momentum=0.3
    ),
    "value_and_write": lambda p, a: p[a].mul_(0.5).view(-1),
}
CONTROL: dict[str, Callable[..., Tensor]] = {
    "cond": lambda p, a, b: torch.cond(
        p[b].sum() > 0, lambda x, y: x.sin() + y.sum(), lambda x, y: x - y.mean(), (p[a], p[b])
    ),
    "cond_views": lambda p, a, b: torch.cond(
        p[a].sum() > 0,
        lambda x, y: x[0].relu() + y[0].sum(),
        lambda x, y: x[1] * y[-1].mean(),
        (p[a], p[b]),
    ),
    "while": lambda p, a, b: while_loop(
        lambda i, x, y: i < 3,
        lambda i, x, y: (i + 1, torch.tanh(x + y.sum()), y.clone()),
        (torch.tensor(0), p[a].clone(), p[b].clone()),
    )[1],
    "map": lambda p, a, b: map_rows(lambda row, other: row.sin() + other.sum(), p[a], p[b]),
}
STEPS: dict[str, Callable[..., Any]] = {
    **COMPUTE,
    **COMPUTE_TWO,
    **VIEW,
    **WRITE,
    **WRITE_TWO,
    **BOTH,
    **CONTROL,
    **VIEW_MORE,
    **WRITE_MORE,
    **WRITE_TWO_MORE,
}
_TWO = frozenset({**COMPUTE_TWO, **WRITE_TWO, **CONTROL, **WRITE_TWO_MORE})
_WRITES_TWO = frozenset({**WRITE_TWO, **WRITE_TWO_MORE})
_KINDS = (COMPUTE, COMPUTE_TWO, VIEW, WRITE, WRITE_TWO, BOTH, CONTROL)
_WEIGHTS = (20, 14, 32, 14, 14, 2, 2)
_MORE = (VIEW_MORE, WRITE_MORE, WRITE_TWO_MORE)
_MORE_WEIGHTS = (10, 15, 10)
_PARAMETERS = 2


@dataclass(slots=True)
class RawProgram:
    """A random model with what is needed to export and call it.

    Attributes:
        seed: Its seed.
        state: The state that its methods share.
        methods: The methods by name.
        dynamic: Whether the first size of the first input varies.
        calls: The calls to compare, in order: method and inputs.
    """

    seed: int
    state: State
    methods: dict[str, Method]
    dynamic: bool
    calls: list[tuple[str, tuple[Tensor, ...]]]

    def models(self) -> dict[str, RawModel]:
        """Return a module for each method, all on one copy of the state."""
        state = copy.deepcopy(self.state)
        return {name: RawModel(state, method) for name, method in self.methods.items()}

    def dynamic_shapes(self) -> Any:
        """Return what ``torch.export.export`` is told of sizes; None if all are fixed."""
        if not self.dynamic:
            return None
        return ((({0: torch.export.Dim("n", min=4, max=8)}), {}, {}),)

    def example(self, method: str) -> tuple[Tensor, ...]:
        """Return inputs to export ``method`` with."""
        return _inputs(random.Random(self.seed + 1), 5 if self.dynamic else 4)

    def expected(self, *, noise: float = 0.0) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return the outputs of each call in eager, and its inputs afterwards.

        Args:
            noise: By how much of itself each number of the state and the inputs is changed before
                each call, to see what rounding may do.
        """
        models = self.models()
        state = next(iter(models.values())).state.state_dict()
        found = []
        for name, inputs in self.calls:
            for value in state.values():
                value.mul_(1 + noise * torch.randn(value.shape))
            own = tuple(value * (1 + noise * torch.randn(value.shape)) for value in inputs)
            with torch.no_grad():
                outputs = [value.clone() for value in models[name](*own)]
            found.append((outputs, list(own)))
        return found


def raw_program(seed: int, *, more: bool = False) -> RawProgram:
    """Return the random program of ``seed``: the same one at every call.

    Args:
        seed: Any number.
        more: Whether it also has steps of ``more_steps``, most of which no kernel has.
    """
    rng = random.Random(seed)
    state = State(rng)
    dynamic = rng.random() < 0.35
    names = ["forward", "second"] if rng.random() < 0.25 else ["forward"]
    methods = {name: _method(rng, state, dynamic, more=more) for name in names}
    sizes = [4, 6, 8] if dynamic else [4, 4, 4]
    calls = [
        (rng.choice(names), _inputs(random.Random(seed + 7 + number), size))
        for number, size in enumerate(sizes)
    ]
    return RawProgram(seed, state, methods, dynamic, calls)


def _inputs(rng: random.Random, size: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return tuple(
        torch.randn(shape, generator=generator) for shape in ((size, 3), (4, 3), (2, 4, 3))
    )


def _method(rng: random.Random, state: State, dynamic: bool, *, more: bool) -> Method:
    method = Method()
    # A step is legal if it is legal for every size that the program may meet.
    states = [copy.deepcopy(state) for _ in range(3 if dynamic else 1)]
    pools = [
        [*one.pool(), *_inputs(rng, size)] for one, size in zip(states, (4, 6, 8), strict=False)
    ]
    wanted = rng.randrange(6, 22)
    for _ in range(12 * wanted):
        if len(method.steps) == wanted:
            break
        step = _step(rng, pools[0], more=more)
        done = _try(step, pools)
        if done is not None:
            pools = done
            method.steps.append(step)
    count = rng.randrange(1, 5)
    # Mostly what came last; sometimes a buffer, an input or a view that was written since.
    latest = range(max(0, len(pools[0]) - 8), len(pools[0]))
    method.returned = [
        rng.choice(latest) if rng.random() < 0.75 else rng.randrange(_PARAMETERS, len(pools[0]))
        for _ in range(count)
    ]
    return method


def _step(rng: random.Random, pool: Pool, *, more: bool) -> Step:
    kinds = (*_KINDS, *(_MORE if more else ()))
    kind = rng.choices(kinds, (*_WEIGHTS, *_MORE_WEIGHTS)[: len(kinds)])[0]
    name = rng.choice(list(kind))
    lowest = _PARAMETERS if kind in (WRITE, WRITE_TWO, BOTH, WRITE_MORE, WRITE_TWO_MORE) else 0
    recent = len(pool) - 1 - min(int(rng.expovariate(0.25)), len(pool) - 1 - lowest)
    first = recent if rng.random() < 0.6 else rng.randrange(lowest, len(pool))
    second = rng.randrange(len(pool))
    return name, (first, second) if name in _TWO else (first,)


def _try(step: Step, pools: Sequence[Pool]) -> list[Pool] | None:
    """Return the pools after ``step``, or None where it cannot be done on all of them."""
    name, args = step
    # Together, so that what shares memory still does.
    trial: list[Pool] = copy.deepcopy(list(pools))
    added = []
    for pool in trial:
        if name in _WRITES_TWO and _reads_what_it_writes(*(pool[index] for index in args)):
            return None
        try:
            with torch.no_grad():
                done = STEPS[name](pool, *args)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None
        if done is not None:
            pool.append(done)
            added.append(done)
        if not all(_is_tame(value) for value in pool):
            return None
    if added and len({value.dim() for value in added}) != 1:
        return None
    return trial


def _reads_what_it_writes(written: Tensor, read: Tensor) -> bool:
    """Return whether one shows part of the other's memory in another way.

    What comes of it hangs on the order of reading and writing. torch refuses where it can tell.
    """
    if written.untyped_storage().data_ptr() != read.untyped_storage().data_ptr():
        return False
    places = [
        torch.arange(len(one.untyped_storage()) // one.element_size()).as_strided(
            one.shape, one.stride(), one.storage_offset()
        )
        for one in (written, read)
    ]
    if places[0].shape == places[1].shape and torch.equal(*places):
        return False
    return not set(places[0].flatten().tolist()).isdisjoint(places[1].flatten().tolist())


def _is_tame(value: Tensor) -> bool:
    if value.numel() > 256 or value.dim() > 4 or not value.numel():
        return False
    return bool(value.isfinite().all()) and float(value.abs().max()) < LARGEST
