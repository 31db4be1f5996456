"""Unflattening against torch.export.unflatten and eager: growth, speed of forward, memory.

With ``LOWERDECK_FORMER`` set to another checkout, such as a worktree of b649b976, building and
first calls are also measured against those of that checkout, in turn.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram, export
from torch.export import unflatten as torch_unflatten

from benchmarks.harness import (
    Row,
    cpu_seconds,
    fresh_process,
    growth_exponent,
    in_rounds,
    median_ratio,
    paired,
)
from lowerdeck.unflatten import export_preserving, unflatten

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
        if former := os.environ.get("LOWERDECK_FORMER"):
            yield from _beside_former(Path(former), quick)
        yield from _exports(quick)
        yield from _shapes(quick)
        yield from _forward(quick)
        yield from _memory(quick)


def layers(count: int) -> nn.Module:
    """Return ``count`` linear layers, each with an activation after it."""
    return nn.Sequential(*[part for _ in range(count) for part in (nn.Linear(4, 4), nn.ReLU())])


class Wide(nn.Module):
    """A list of ``count`` linear layers, called one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


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


class Dicts(nn.Module):
    """Tiny modules in a list, each of which takes a dict and returns one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(TakesDict() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = {"one": x, "two": x + 1}
        for part in self.parts:
            held = part(held)
        return held["one"]


class TakesDict(nn.Module):
    """Two operators for the two tensors of a dict."""

    def forward(self, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"one": held["one"] + held["two"], "two": held["two"] * 0.5}


class FlatOps(nn.Module):
    """Two hundred pointwise operators in one module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            x = (x + 1).relu() * 0.5 - x
        return x


def _program(model: nn.Module, x: torch.Tensor, record: Any = export) -> ExportedProgram:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # torch.export alone needs it for deep models
    try:
        return record(model.eval(), (x,))  # type: ignore[no-any-return]
    finally:
        sys.setrecursionlimit(limit)


def _layers(quick: bool) -> Iterator[Row]:
    sizes = (100, 200, 400) if quick else (100, 1000, 5000, 20000)
    wanted = {1000: 10, 5000: 37}
    series: list[tuple[float, float]] = []
    for count in sizes:
        program = _program(layers(count), torch.randn(1, 4))
        nodes = len(program.graph.nodes)
        mine = cpu_seconds(partial(unflatten, program), repeat=5)
        theirs = None
        if count <= 5000:
            # Minutes at the largest size, for it is quadratic: once is enough.
            repeat = 3 if count <= 1000 else 1
            theirs = cpu_seconds(partial(torch_unflatten, program), repeat=repeat)
        series.append((nodes, mine))
        per_node = mine / nodes * 1e6
        faster = wanted.get(count)
        met = per_node <= 60
        if faster is not None and theirs is not None:
            met = met and theirs / mine >= faster
        yield Row(
            PACKAGE,
            f"unflatten, {count} layers ({nodes} nodes)",
            per_node,
            None if theirs is None else theirs / nodes * 1e6,
            "us/node",
            "<= 60 us a node" + (f", >= {faster}x faster" if faster is not None else ""),
            met,
            PEER,
        )
    yield _growth("growth with layers", series)


_BUILDS = """
import gc, sys, time, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from lowerdeck.unflatten import export_preserving, unflatten
torch.set_num_threads(1)
def timed(action):
    gc.collect()
    start = time.process_time()
    result = action()
    return time.process_time() - start, result
programs, x = {}, torch.randn(1, 4)
for line in sys.stdin:
    kind, count = line.split()
    if line not in programs:
        parts = [part for _ in range(int(count)) for part in (nn.Linear(4, 4), nn.ReLU())]
        record = torch.export.export if kind == "plain" else export_preserving
        programs[line] = record(nn.Sequential(*parts).eval(), (x,))
    with torch.no_grad():
        build, module = timed(lambda: unflatten(programs[line]))
        first, _ = timed(lambda: module(x))
    print(build, first, len(programs[line].graph.nodes), flush=True)
"""
"""Code of a process that prints the seconds of building a module and of its first call."""


def _beside_former(former: Path, quick: bool) -> Iterator[Row]:
    """Yield building and first call against another checkout, in turn, in a process each."""
    own = Path(__file__).parents[1]
    workers = []
    for root in (own, former):
        path = os.pathsep.join(map(str, sorted(root.glob("packages/*/src"))))
        workers.append(
            subprocess.Popen(
                [sys.executable, "-c", _BUILDS],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    def measure(worker: Any, case: str) -> list[float]:
        worker.stdin.write(f"{case}\n")
        worker.stdin.flush()
        return [float(figure) for figure in worker.stdout.readline().split()]

    for kind in ("plain", "preserving"):
        series = []
        for count in (60, 240) if quick else (60, 240, 1000, 5000):
            rounds = [
                [measure(worker, f"{kind} {count}") for worker in workers]
                for _ in range(5 if quick else 15)
            ]
            nodes = rounds[0][0][2]
            # The first round warms up.
            ours, theirs = (
                [min(figures) / nodes * 1e6 for figures in zip(*each, strict=True)]
                for each in zip(*rounds[1:], strict=True)
            )
            series.append((nodes, ours[0]))
            note = f"{former.name}; a {kind} export"
            met = ours[0] <= 0.6 * theirs[0]
            case = f"{count} layers, {kind}"
            goal = "<= 0.6 of the former"
            yield Row(PACKAGE, f"build, {case}", ours[0], theirs[0], "us/node", goal, met, note)
            yield Row(PACKAGE, f"first call, {case}", ours[1], theirs[1], "us/node", note=note)
        exponent = growth_exponent([(nodes, nodes * each) for nodes, each in series])
        case = f"growth with layers, {kind} export"
        yield Row(PACKAGE, case, exponent, None, "exponent", "<= 1.05", exponent <= 1.05)
    for worker in workers:
        worker.communicate()


def _exports(quick: bool) -> Iterator[Row]:
    """Yield ``export_preserving`` against torch's export."""
    count = 100 if quick else 500
    model, x = layers(count).eval(), torch.randn(1, 4)
    ours, theirs = paired(partial(export_preserving, model, (x,)), partial(export, model, (x,)))
    case = f"export_preserving, {count} layers"
    met = ours <= 1.3 * theirs
    yield Row(PACKAGE, case, ours, theirs, "s", "<= 1.3 torch.export", met, "torch.export.export")


def _growth(case: str, series: Iterable[tuple[float, float]]) -> Row:
    exponent = growth_exponent(series)
    return Row(PACKAGE, case, exponent, None, "exponent", "<= 1.1", exponent <= 1.1)


def _shapes(quick: bool) -> Iterator[Row]:
    """Yield cost and growth of wide and deep hierarchies, and of one module's many calls."""
    shapes: list[tuple[str, Callable[[int], nn.Module], torch.Tensor, tuple[int, ...], str]] = [
        ("a ModuleList of {}", Wide, torch.randn(1, 4), (1000, 2000, 4000, 8000, 16000), ""),
        ("depth {}", Nested, torch.randn(1, 4), (75, 150, 300), ""),
        (
            "{} calls of one module",
            partial(Repeats, special=False),
            torch.randn(2),
            (500, 1000, 2000),
            "",
        ),
        (
            "{} specialised calls of one module",
            partial(Repeats, special=True),
            torch.randn(2),
            (100, 200, 400),
            "< 0.2 s",
        ),
    ]
    for name, make, x, full, goal in shapes:
        sizes = [size // 4 for size in full if size <= 4000] if quick else full
        programs = [_program(make(size), x) for size in sizes]
        costs = in_rounds(
            [partial(cpu_seconds, partial(unflatten, p), repeat=1) for p in programs]
        )
        nodes = [len(program.graph.nodes) for program in programs]
        theirs = None
        # Above that it takes minutes: it is quadratic there.
        if sizes[-1] <= 2000:
            theirs = cpu_seconds(partial(torch_unflatten, programs[-1]), repeat=2)
        case = name.format(sizes[-1])
        note = PEER if theirs is not None else f"{costs[-1] / nodes[-1] * 1e6:.0f} us a node"
        met = costs[-1] < 0.2 if goal else None
        yield Row(PACKAGE, f"unflatten, {case}", costs[-1], theirs, "s", goal, met, note)
        yield _growth(f"growth, {name.format('n')}", zip(sizes, costs, strict=True))


def _forward(quick: bool) -> Iterator[Row]:
    encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    depth = 50 if quick else 100
    wide = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0)
    convolutions = [
        part
        for _ in range(6)
        for part in (nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
    ]
    # Operators that take as long as those of real models, and tiny ones: calls of Python alone.
    cases: list[tuple[str, nn.Module, torch.Tensor, float]] = [
        (
            "4 transformer blocks of width 512",
            nn.TransformerEncoder(wide, 4, enable_nested_tensor=False),
            torch.randn(1, 64, 512),
            1.05,
        ),
        ("6 convolution blocks", nn.Sequential(*convolutions), torch.randn(1, 64, 56, 56), 1.05),
        ("200 small layers", layers(100), torch.randn(1, 4), 1.15),
        (
            "12 transformer blocks of width 64",
            nn.TransformerEncoder(encoder, 12, enable_nested_tensor=False),
            torch.randn(1, 16, 64),
            1.15,
        ),
        ("200 flat operators", FlatOps(), torch.randn(8), 1.15),
        (f"depth {depth}", Nested(depth), torch.randn(1, 4), 1.15),
        ("30 tiny modules that take a dict", Dicts(30), torch.randn(4), 1.15),
    ]
    for name, model, x, goal in cases:
        for kind in ("plain", "preserving"):
            # A plain export does not record that a dict is passed.
            if kind == "preserving" or not isinstance(model, Dicts):
                yield from _forward_rows(f"{name}, {kind} export", kind, model, x, goal, quick)


def _forward_rows(
    case: str, kind: str, model: nn.Module, x: torch.Tensor, goal: float, quick: bool
) -> Iterator[Row]:
    """Yield the first call, and later calls as the median ratio to eager's of 40 pairs."""
    program = _program(model, x, export if kind == "plain" else export_preserving)
    mine, theirs = unflatten(program), torch_unflatten(program)
    with torch.no_grad():
        first, peer_first = (cpu_seconds(partial(made, x), repeat=1) for made in (mine, theirs))
        note = f"{PEER}; once, with what torch makes at its first call"
        yield Row(PACKAGE, f"first call, {case}", first, peer_first, "s", "", None, note)
        ratio, peer = (
            median_ratio(_calls(module, x), _calls(model, x), pairs=10 if quick else pairs)
            for module, pairs in ((mine, 40), (theirs, 10))
        )
    goal_text = f"<= {goal}x eager"
    yield Row(PACKAGE, f"forward, {case}", ratio, peer, "x eager", goal_text, ratio <= goal, PEER)


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
