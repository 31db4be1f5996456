"""The runner against torch's own kernels and the official portable runtime."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from time import perf_counter

import torch

from benchmarks.harness import Row, cpu_seconds, growth_exponent, in_rounds, paired
from examples import resnet18
from lowerdeck.emitter import emit
from lowerdeck.runner import LoadedMethod, load
from lowerdeck_zoo import Of, assert_close, official


def rows(quick: bool) -> Iterator[Row]:
    """Yield all measurements of this package."""
    torch.set_num_threads(1)
    yield from _overhead(50 if quick else 200)
    yield from _loading((250, 500, 1000) if quick else (1000, 2000, 4000, 8000))
    yield from _resnet(64 if quick else 224)


def small(length: int) -> Of:
    """Return a long chain of operators on eight numbers, where nothing but overhead costs."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            x = torch.sin(x + x)
        return x

    return Of(forward)


def _small(length: int) -> LoadedMethod:
    x = torch.randn(8)
    return load(emit(torch.export.export(small(length), (x,))).program).method()


def _overhead(length: int) -> Iterator[Row]:
    forward, x = _small(length), torch.randn(8)
    add, sin = torch.ops.aten.add.out, torch.ops.aten.sin.out
    first, second = torch.empty(8), torch.empty(8)

    def kernels() -> None:
        with torch.inference_mode():
            for _ in range(length):
                add(first, first, out=second)
                sin(second, out=first)

    def ours() -> None:
        forward.run_flat([x])

    def times(action: object, count: int = 10) -> object:
        return lambda: [action() for _ in range(count)]  # type: ignore[operator]

    ours_s, kernels_s = paired(times(ours), times(kernels), repeat=9)  # type: ignore[arg-type]
    scale = 1e6 / (10 * 2 * length)
    yield Row(
        "runner",
        f"one instruction of {2 * length} on 8 numbers",
        ours_s * scale,
        kernels_s * scale,
        "us",
        "<= 3x the torch kernel",
        ours_s <= 3 * kernels_s,
        "peer: the same kernels called from Python with out=",
    )


def _loading(sizes: tuple[int, ...]) -> Iterator[Row]:
    x = torch.randn(8)
    files = [emit(torch.export.export(small(size // 2), (x,))).to_bytes() for size in sizes]
    loads = [partial(cpu_seconds, partial(_load, content), repeat=1) for content in files]
    costs = in_rounds(loads, repeat=5)
    exponent = growth_exponent(zip(sizes, costs, strict=True))
    yield Row(
        "runner",
        f"loading {sizes[0]} to {sizes[-1]} instructions, growth",
        exponent,
        unit="exponent",
        goal="<= 1.1",
        met=exponent <= 1.1,
        note=f"{costs[-1] / sizes[-1] * 1e6:.1f} us an instruction",
    )


def _load(content: bytes) -> LoadedMethod:
    return load(content).method()


def _resnet(side: int) -> Iterator[Row]:
    if not official.available():
        return
    image = torch.randn(1, 3, side, side)
    content = emit(torch.export.export(resnet18.ResNet18().eval(), (image,))).to_bytes()
    forward = load(content).method()
    ours, peer = [], []
    for _ in range(3):
        start = perf_counter()
        result = forward.run_flat([image])
        ours.append(perf_counter() - start)
        outcome = official.run(content, [official.Call((image,))] * 2)
        if not isinstance(outcome, official.Ran):
            raise RuntimeError(f"the official runtime cannot run ResNet-18: {outcome}")
        assert_close(result, outcome.outputs[-1], atol=1e-3, rtol=1e-3)
        peer.append(outcome.seconds[-1])
    ours_s, peer_s = statistics.median(ours), statistics.median(peer)
    yield Row(
        "runner",
        f"ResNet-18, one image of {side} x {side}",
        ours_s,
        peer_s,
        "s",
        "no slower than the official portable runtime",
        ours_s <= peer_s,
        "peer: ExecuTorch's portable kernels; wall time, one thread each",
    )
