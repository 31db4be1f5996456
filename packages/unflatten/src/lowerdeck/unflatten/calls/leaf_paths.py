"""How a caller writes each leaf of the arguments, for messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lowerdeck.torch_base import pytree


def leaf_paths(
    in_spec: pytree.TreeSpec, labels: Sequence[str], examples: Sequence[Any]
) -> list[str]:
    """Return how a caller writes each leaf, such as ``x`` or ``options['scale']``."""
    args, kwargs = in_spec.children()
    found: list[str] = []
    for label, spec in zip(labels, [*args.children(), *kwargs.children()], strict=True):
        leaves = examples[len(found) : len(found) + spec.num_leaves]
        found += [label + part for part in _part_paths(spec, leaves)]
    return found


def _part_paths(spec: pytree.TreeSpec, leaves: Sequence[Any]) -> Iterator[str]:
    """Yield how each leaf is reached from the argument that it is a part of."""
    try:
        blank = pytree.tree_unflatten(leaves, spec)
        paths = [path for path, _ in pytree.tree_flatten_with_path(blank)[0]]
    except Exception:
        # A class may say anything of leaves that are only examples.
        paths = []
    if len(paths) == len(leaves):
        yield from map(pytree.keystr, paths)
    else:
        yield from (f" (leaf {index})" for index in range(len(leaves)))
