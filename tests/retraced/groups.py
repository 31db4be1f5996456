"""The programs that are taken apart, in groups that each run in a process of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from lowerdeck_zoo import program, programs
from tests.retraced.judge import Finding, judge
from tests.soak.raw_programs import RawProgram, raw_program

SEEDS = 2000


def groups(kind: str) -> list[str]:
    """Return the names of all groups of one kind.

    Args:
        kind: ``raw``, ``writes``, ``zoo``, ``models`` or ``operators``.
    """
    if kind in ("raw", "writes"):
        return [f"{kind}/{seed}" for seed in range(SEEDS)]
    if kind == "zoo":
        return [f"zoo/{one.name}" for one in programs(without="several-methods large")]
    if kind == "models":
        return [f"models/{one.name}" for one in programs("large")]
    return [f"operators/{name}" for name in _operators()]


def findings(group: str) -> Iterator[Finding]:
    """Yield what came of the programs of a group.

    Args:
        group: Its name.
    """
    kind, _, name = group.partition("/")
    if kind in ("raw", "writes"):
        yield from _raw(group, raw_program(int(name), more=kind == "writes"))
    elif kind in ("zoo", "models"):
        one = program(name)
        yield judge(group, name, one.export_anew, lambda: (one.module(), one.calls()[0].args))
    else:
        yield from _samples(group, *_operators()[name])


def _raw(group: str, made: RawProgram) -> Iterator[Finding]:
    def export(name: str) -> torch.export.ExportedProgram:
        return torch.export.export(
            made.models()[name], made.example(name), dynamic_shapes=made.dynamic_shapes()
        )

    def eager(name: str) -> Any:
        return made.models()[name], made.example(name)

    for name in made.methods:
        yield judge(group, name, partial(export, name), partial(eager, name))


@cache
def _operators() -> dict[str, tuple[Any, torch.dtype]]:
    # It loads torch's own tests, which takes seconds.
    from tests.conformance.samples import ALL_DTYPES, operators

    return {name: (info, dtype) for name, info, dtype in operators(ALL_DTYPES)}


def _samples(group: str, info: Any, dtype: torch.dtype) -> Iterator[Finding]:
    from tests.conformance.samples import samples

    for index, sample in enumerate(samples(info, dtype)):
        export: Callable[[], Any] = partial(torch.export.export, sample.module, sample.inputs)
        yield judge(group, str(index), export)
