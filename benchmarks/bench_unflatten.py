"""Unflattening beside torch.export.unflatten and eager: growth, speed of forward, memory."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram, export
from torch.export import unflatten as torch_unflatten

from benchmarks.harness import Row, fresh_process, growth_exponent, paired
from lowerdeck.unflatten import unflatten

PACKAGE = "unflatten"
PEER = "torch.export.unflatten"


def rows(quick: bool) -> Iterator[Row]:
    """Yield the rows of this package.

    Args:
        quick: Sizes that take seconds instead of minutes.
    """
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from _layers(quick)
        yield from _repeated(quick)
        yield from _forward(quick)
        yield from _memory(quick)


def layers(count: int) -> nn.Module:
    """Return ``count`` linear layers, each with an activation behind it."""
    return nn.Sequential(*[part for _ in range(count) for part in (nn.Linear(4, 4), nn.ReLU())])


class Nested(nn.Module):
    """A linear layer in ``depth`` modules."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner: nn.Module = Nested(depth - 1) if depth else nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


class Repeats(nn.Module):
    """One module called again and again, each time the same or each time another way."""

    def __init__(self, count: int, *, special: bool) -> None:
        super().__init__()
        self.child = Special()
        self.count = count
        self.special = special

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.count):
            x = self.child(x, number if self.special else 1)
        return x


class Special(nn.Module):
    """Multiplies by a constant that is known when it is traced."""

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x * number


class FlatOps(nn.Module):
    """Two hundred pointwise operators in one module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            x = (x + 1).relu() * 0.5 - x
        return x


def _program(model: nn.Module, x: torch.Tensor) -> ExportedProgram:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # torch.export alone needs it for deep models
    try:
        return export(model.eval(), (x,))
    finally:
        sys.setrecursionlimit(limit)


def _time(program: ExportedProgram, *, with_peer: bool) -> tuple[float, float | None]:
    gc.collect()
    if not with_peer:
        mine, _ = paired(lambda: unflatten(program), lambda: None, repeat=3)
        return mine, None
    return paired(lambda: unflatten(program), lambda: torch_unflatten(program), repeat=3)


def _layers(quick: bool) -> Iterator[Row]:
    sizes = (100, 200, 400) if quick else (100, 1000, 5000, 20000)
    peer_up_to = 400 if quick else 1000
    series: list[tuple[float, float, float | None]] = []
    for count in sizes:
        program = _program(layers(count), torch.randn(1, 4))
        nodes = len(program.graph.nodes)
        mine, theirs = _time(program, with_peer=count <= peer_up_to)
        series.append((nodes, mine, theirs))
        per_node = mine / nodes * 1e6
        yield Row(
            PACKAGE,
            f"unflatten, {count} layers ({nodes} nodes)",
            per_node,
            None if theirs is None else theirs / nodes * 1e6,
            "us/node",
            "<= 60 us a node",
            per_node <= 60,
            PEER,
        )
    exponent = growth_exponent((size, mine) for size, mine, _ in series)
    points = tuple(series)
    yield Row(
        PACKAGE, "growth with layers", exponent, None, "exponent", "<= 1.1", exponent <= 1.1,
        series=points,
    )  # fmt: skip
    depth = 100 if quick else 300
    program = _program(Nested(depth), torch.randn(1, 4))
    mine, theirs = _time(program, with_peer=True)
    yield Row(PACKAGE, f"unflatten, depth {depth}", mine, theirs, "s", note=PEER)


def _repeated(quick: bool) -> Iterator[Row]:
    for special, full, goal in ((False, 2000, ""), (True, 400, "< 0.2 s")):
        count = full // 4 if quick else full
        program = _program(Repeats(count, special=special), torch.randn(2))
        mine, theirs = _time(program, with_peer=True)
        kind = "specialised calls" if special else "calls"
        met = mine < 0.2 if goal else None
        yield Row(
            PACKAGE, f"unflatten, {count} {kind} of one module", mine, theirs, "s", goal, met, PEER
        )


def _forward(quick: bool) -> Iterator[Row]:
    encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    depth = 50 if quick else 100
    cases: list[tuple[str, nn.Module, torch.Tensor, float]] = [
        ("200 small layers", layers(100), torch.randn(1, 4), 1.6),
        (
            "12 transformer blocks",
            nn.TransformerEncoder(encoder, 12, enable_nested_tensor=False),
            torch.randn(1, 16, 64),
            1.3,
        ),
        ("200 flat operators", FlatOps(), torch.randn(8), 1.4),
        (f"depth {depth}", Nested(depth), torch.randn(1, 4), 1.4),
    ]
    for name, model, x, goal in cases:
        program = _program(model, x)
        mine, theirs = unflatten(program), torch_unflatten(program)
        repeat = 5 if quick else 15
        with torch.no_grad():
            ours, eager = paired(_calls(mine, x), _calls(model, x), repeat=repeat)
            peer, eager_again = paired(_calls(theirs, x), _calls(model, x), repeat=3)
        ratio = ours / eager
        yield Row(
            PACKAGE,
            f"forward, {name}",
            ratio,
            peer / eager_again,
            "x eager",
            f"<= {goal}x eager",
            ratio <= goal,
            PEER,
        )


def _calls(module: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        for _ in range(10):
            module(x)

    return run


_MEMORY = """
import resource, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from torch.export import export
if sys.argv[1] == "ours":
    from lowerdeck.unflatten import unflatten
else:
    from torch.export import unflatten
size = int(sys.argv[2])
model = nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(16)])
program = export(model, (torch.randn(1, int(sys.argv[2])),))
if sys.argv[1] != "none":
    module = unflatten(program)
    with torch.no_grad():
        module(torch.randn(1, int(sys.argv[2])))
else:
    with torch.no_grad():
        model(torch.randn(1, int(sys.argv[2])))
"""


def _memory(quick: bool) -> Iterator[Row]:
    size = 1024 if quick else 2048
    weights = 16 * size * size * 4 / 2**20
    peak = {
        who: fresh_process(_MEMORY, who, str(size))["peak_mb"] for who in ("none", "ours", "torch")
    }
    mine, theirs = (100 * (peak[who] - peak["none"]) / weights for who in ("ours", "torch"))
    yield Row(
        PACKAGE,
        f"memory added, {weights:.0f} MB of weights",
        mine,
        theirs,
        "% of the weights",
        "<= 2 %",
        mine <= 2,
        PEER,
    )
