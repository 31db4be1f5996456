"""Lowering against executorch 1.4.1: time and growth.

The backend does nothing, so that what is measured is the lowering itself.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.harness import Row, cpu_seconds, growth_exponent, in_rounds, paired
from lowerdeck.lowered_module import (
    BackendDetails,
    DelegationSpec,
    PartitionResult,
    PreprocessResult,
    to_backend,
)
from lowerdeck_zoo import Of

PACKAGE = "lowered_module"


class Nothing(BackendDetails):
    """A backend whose preprocess costs nothing."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:  # noqa: ARG004
        return PreprocessResult(b"nothing")


def export(module: torch.nn.Module, *inputs: torch.Tensor) -> torch.export.ExportedProgram:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.export.export(module.eval(), inputs).run_decompositions()


def chain(nodes: int) -> torch.export.ExportedProgram:
    """Return nodes in a row; every fifth is left to the program, so that partitions are many."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        for number in range(nodes):
            x = x + 1.0 if number % 5 else torch.tan(x)
        return x

    return export(Of(forward), torch.randn(4))


def tag(program: Any, chosen: Callable[[torch.fx.Node], bool]) -> list[str]:
    """Tag runs of chosen nodes; return the tags."""
    tags: list[str] = []
    fresh = True
    for node in program.graph.nodes:
        if node.op != "call_function" or not chosen(node):
            fresh = True
            continue
        if fresh:
            tags.append(f"tag{len(tags)}")
            fresh = False
        node.meta["delegation_tag"] = tags[-1]
    return tags


def left(node: torch.fx.Node) -> bool:
    return node.target is not torch.ops.aten.tan.default


def ours(program: Any, chosen: Callable[[torch.fx.Node], bool] = left) -> Any:
    def partition(tagged: Any) -> PartitionResult:
        return PartitionResult(
            tagged, {name: DelegationSpec("Nothing", []) for name in tag(tagged, chosen)}
        )

    return to_backend(program, partition)


def peer() -> Callable[..., Any] | None:
    """Return the peer's lowering with the same partitions, or None where it is not installed."""
    if importlib.util.find_spec("executorch") is None:
        return None
    if importlib.util.find_spec("torchao") is None:
        return None
    from executorch.exir.backend.backend_api import to_backend as lower
    from executorch.exir.backend.backend_details import BackendDetails as PeerDetails
    from executorch.exir.backend.backend_details import PreprocessResult as PeerResult
    from executorch.exir.backend.partitioner import DelegationSpec as PeerSpec
    from executorch.exir.backend.partitioner import Partitioner as PeerPartitioner
    from executorch.exir.backend.partitioner import PartitionResult as PeerPartition

    class NothingPeer(PeerDetails):
        @staticmethod
        def preprocess(edge_program: Any, compile_specs: Any) -> Any:  # noqa: ARG004
            return PeerResult(b"nothing")

    class Chosen(PeerPartitioner):
        def __init__(self, chosen: Callable[[torch.fx.Node], bool]) -> None:
            super().__init__()
            self.chosen = chosen

        def partition(self, exported_program: Any) -> Any:
            tags = tag(exported_program, self.chosen)
            return PeerPartition(
                exported_program, {name: PeerSpec("NothingPeer", []) for name in tags}
            )

    # Classes are found through weak references: keep this one.
    peer.backend = NothingPeer  # type: ignore[attr-defined]
    return lambda program, chosen=left: lower(program, Chosen(chosen))


def rows(quick: bool) -> Iterator[Row]:
    """Yield the measurements of the issue."""
    lower = peer()
    yield from time_rows(quick, lower)


def time_rows(quick: bool, lower: Callable[..., Any] | None) -> Iterator[Row]:
    size = 500 if quick else 2000
    program = chain(size)
    theirs = None
    if lower is not None:
        mine, theirs = paired(lambda: ours(program), lambda: lower(program), repeat=1)
    mine = cpu_seconds(lambda: ours(program))
    faster = None if theirs is None else theirs / mine
    yield Row(
        PACKAGE,
        f"to_backend, {size} nodes in {size // 5} partitions",
        mine,
        theirs,
        goal="<= 3 s and >= 20x at 2,000 / 400",
        met=mine <= 3 and (faster is None or faster >= 20),
        note="peer: executorch 1.4.1",
    )
    sizes = [250, 500, 1000, 2000] if quick else [1250, 2500, 5000, 10000]
    programs = [chain(n) for n in sizes]
    lowerings = [partial(ours, program) for program in programs]
    costs = in_rounds([partial(cpu_seconds, each, repeat=1) for each in lowerings])
    series = list(zip(sizes, costs, strict=True))
    if not quick:
        yield Row(
            PACKAGE,
            "to_backend, 10,000 nodes in 2,000 partitions",
            series[-1][1],
            goal="<= 20 s (for 1,000 partitions)",
            met=series[-1][1] <= 20,
        )
    slope = growth_exponent(series)
    yield Row(
        PACKAGE,
        f"growth of to_backend from {sizes[0]} to {sizes[-1]} nodes, a partition for each 5",
        slope,
        unit="exponent",
        goal="linear: <= 1.15",
        met=slope <= 1.15,
    )
