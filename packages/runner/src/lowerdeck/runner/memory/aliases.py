"""Aliases in a memory plan, such as reshapes and slices that share memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lowerdeck.runner.instructions import BoundChain
from lowerdeck.runner.values.tensors import Origin, TensorSpec


def find_aliases(
    chains: Sequence[BoundChain],
    specs: Sequence[TensorSpec | None],
    *,
    inputs: Sequence[int],
    outputs: Sequence[int],
    unwritten: Collection[int],
) -> list[tuple[int, int]]:
    """Return pairs (value, alias): the value is the last one written around the alias's bytes.

    Args:
        specs: The tensor values of the file.
        inputs: The inputs of the method.
        outputs: The outputs of the method.
        unwritten: The values that are read although nothing has written them.
    """
    pairs = []
    written = list(inputs)
    pending = set(unwritten)
    steps = [(item.reads, item.writes) for chain in chains for item in chain.instructions]
    for reads, writes in [*steps, (tuple(outputs), ())]:
        for index in pending.intersection(reads):
            pending.discard(index)
            source = _last_around(index, written, specs)
            if source is not None:
                pairs.append((source, index))
        # A value that is written before it is read is not an alias.
        pending.difference_update(writes)
        written += writes
    return pairs


def _around(outer: TensorSpec, inner: TensorSpec) -> bool:
    return (
        outer.origin is Origin.PLANNED
        and outer.memory_id == inner.memory_id
        and outer.offset <= inner.offset
        and inner.offset + inner.nbytes <= outer.offset + outer.nbytes
    )


def _last_around(
    index: int, written: Sequence[int], specs: Sequence[TensorSpec | None]
) -> int | None:
    """Return the value written last whose bytes contain those of ``index``, or None."""
    alias = specs[index]
    if alias is None or alias.origin is not Origin.PLANNED:
        return None
    for other in reversed(written):
        spec = specs[other]
        if spec is not None and other != index and _around(spec, alias):
            return other
    return None
