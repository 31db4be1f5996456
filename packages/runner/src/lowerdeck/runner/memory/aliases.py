"""Values that only name the bytes of others, as a memory plan writes reshapes and slices."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lowerdeck.runner.instructions import BoundChain, Instruction
from lowerdeck.runner.values.tensors import Origin, TensorSpec


def find_aliases(
    chains: Sequence[BoundChain],
    specs: Sequence[TensorSpec | None],
    *,
    inputs: Sequence[int],
    outputs: Sequence[int],
    unwritten: Collection[int],
) -> list[tuple[int, int]]:
    """Return pairs (value, alias): the alias lies in what was written last before it is read.

    Args:
        chains: The code.
        specs: What the file says of each value.
        inputs: The values that the caller gives.
        outputs: The values that the caller takes.
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
        # What is written before it is read is a value of its own.
        pending.difference_update(writes)
        written += writes
    return pairs


def is_unread_view(
    index: int,
    before: Sequence[Instruction],
    inputs: Sequence[int],
    needed_later: Collection[int],
    specs: Sequence[TensorSpec | None],
) -> bool:
    """Return whether a value can only be a name for bytes that were written for it to read.

    A result may lie where something that is dead lay, so that the address alone tells nothing. But
    bytes that were written and never read since are not dead: somebody must read them under
    another name.

    Args:
        index: A value that nothing has written.
        before: What has run, in order.
        inputs: The values that the caller gives.
        needed_later: Values that are read after this.
        specs: What the file says of each value.
    """
    alias = specs[index]
    if alias is None or alias.origin is not Origin.PLANNED or alias.has_state:
        return False
    read_since = False
    for item in [*reversed(before), Instruction("inputs", writes=tuple(inputs))]:
        if index in item.reads:
            return True
        for other in item.writes:
            spec = specs[other]
            if spec is not None and _overlap(spec, alias):
                renamed = _around(spec, alias) and _differ(spec, alias, other in inputs)
                return renamed and (other in needed_later or not read_since)
        read_since = read_since or any(
            spec is not None and _overlap(spec, alias)
            for spec in map(specs.__getitem__, item.reads)
        )
    return False


def _differ(base: TensorSpec, alias: TensorSpec, given: bool) -> bool:
    """Return whether another name is of any use: for another shape, or for a part."""
    if given and base.nbytes != alias.nbytes:
        return False  # rather a result on the memory of an input that nobody reads
    return (base.sizes, base.dtype, base.dim_order) != (alias.sizes, alias.dtype, alias.dim_order)


def _overlap(one: TensorSpec, other: TensorSpec) -> bool:
    return (
        one.origin is other.origin is Origin.PLANNED
        and one.memory_id == other.memory_id
        and one.offset < other.offset + other.nbytes
        and other.offset < one.offset + one.nbytes
    )


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
    """Return the value written last whose bytes hold those of ``index``, or None."""
    alias = specs[index]
    if alias is None or alias.origin is not Origin.PLANNED:
        return None
    for other in reversed(written):
        spec = specs[other]
        if spec is not None and other != index and _around(spec, alias):
            return other
    return None
