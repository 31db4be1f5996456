"""With what a call was recorded: what tells the forms of a module apart, and what it must get.

A program holds what one call computed. What it computes for another constant, or for another size
than a fixed one, it does not hold: the constants in it may come from these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Proxy

from lowerdeck.torch_base import pytree
from lowerdeck.unflatten.calls.carrying import IN_PARTS, PRIVATE, are_one
from lowerdeck.unflatten.calls.leaf_paths import leaf_paths
from lowerdeck.unflatten.calls.recorded_leaves import Recorded, RecordedTensor
from lowerdeck.unflatten.calls.signature import CallSignature, argument_labels, flatten_like
from lowerdeck.unflatten.errors import (
    InputConstraintError,
    InputStructureError,
    UnflattenError,
)

RecordedCall = tuple[Recorded, ...]
"""What the leaves of one call's arguments were."""


def fits(call: RecordedCall, leaves: Sequence[Any]) -> bool:
    """Return whether ``leaves`` may be passed to what was recorded of a call."""
    return (
        len(call) == len(leaves)
        and all(
            (want is None or want.fits(leaf)) and not lacks_twin(want, leaf, leaves)
            for want, leaf in zip(call, leaves, strict=True)
        )
        and not any(exceeds(want, leaves) for want in call)
    )


def lacks_twin(want: Recorded, leaf: object, leaves: Sequence[Any]) -> bool:
    """Return whether ``leaf`` must be the tensor that another one of ``leaves`` is, and is not."""
    if not isinstance(want, RecordedTensor) or want.twin is None:
        return False
    return not are_one(leaf, leaves[want.twin])


def exceeds(want: Recorded, leaves: Sequence[Any]) -> bool:
    """Return whether the sizes of ``leaves``, which fit else, are ones that were not recorded."""
    return (
        isinstance(want, RecordedTensor)
        and want.limits is not None
        and not want.limits.hold_for(leaves)
    )


def told_by_arguments(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> int:
    """Return the number of the one form of ``module`` that was recorded with such arguments.

    Args:
        module: The module, of several forms.
        args: The positional arguments.
        kwargs: The keyword arguments.

    Raises:
        InputConstraintError: There is no such form, or more than one.
    """
    first = module.__dict__[PRIVATE]
    bodies = (first, *first.others)
    if any(body.is_part for body in bodies):
        raise UnflattenError(f"A module was called that {IN_PARTS}.")
    leaves = [_leaves_of(body.signature, args, kwargs) for body in bodies]
    found = [
        number
        for number, (body, given) in enumerate(zip(bodies, leaves, strict=True))
        if given is not None and any(fits(call, given) for call in body.recorded)
    ]
    if len(found) > 1:
        found = _of_same_types(found, bodies, leaves) or found
    if len(found) == 1:
        return found[0]
    told = "\n".join(
        f"  {number}: {_shown(call)}"
        for number, body in enumerate(bodies)
        for call in body.recorded
    )
    which = f"fit the forms {found}" if found else "fit none of them"
    raise InputConstraintError(
        f"A module was called that the program calls in {len(bodies)} forms, and nothing told "
        f"which of them is meant: the arguments {which}.\n{told}\nThe code of the module's caller "
        "tells it, through whatever is put around the module, but not on another thread, in a "
        "recomputation of activations, or while something traces the module alone. Call one "
        "form, call_modules()[number] of the module, or export with export_preserving: constants "
        "among the arguments tell forms apart."
    )


def untold_forms(bodies: Sequence[Any]) -> list[int]:
    """Return the numbers of the forms that arguments alone do not tell from each other.

    Args:
        bodies: What the forms run.
    """
    parts = [_parts(body) for body in bodies]
    found: set[int] = set()
    for numbers in _maybe_alike(bodies):
        for number in numbers:
            if number in found:
                continue
            for other in numbers:
                if other == number or not _are_structured_alike(parts[number], parts[other]):
                    continue
                if _have_calls_alike(bodies[number], bodies[other]):
                    found |= {number, other}
                    break
    return sorted(found)


def _maybe_alike(bodies: Sequence[Any]) -> list[list[int]]:
    """Return groups of forms; those in no group together have no calls alike.

    There may be thousands, most of them told apart by one constant.
    """
    varies: dict[tuple[int, int], bool] = {}
    for body in bodies:
        for call in body.recorded:
            for index, leaf in enumerate(call):
                varies[len(call), index] = varies.get((len(call), index), False) or (
                    leaf is None or (isinstance(leaf, RecordedTensor) and None in leaf.shape)
                )
    groups: dict[object, dict[int, None]] = {}
    for number, body in enumerate(bodies):
        for call in body.recorded:
            told = tuple(
                None if varies[len(call), index] else _plain(leaf)
                for index, leaf in enumerate(call)
            )
            groups.setdefault(told, {})[number] = None
    return [list(numbers) for numbers in groups.values()]


def _plain(leaf: Recorded) -> object:
    return (leaf.dtype, leaf.shape) if isinstance(leaf, RecordedTensor) else leaf


def twins_of(bodies: Sequence[Any]) -> list[str]:
    """Return which arguments must be one tensor whatever calls what runs ``bodies``, and why.

    Args:
        bodies: What the forms run.
    """
    found: dict[str, None] = {}
    for body in bodies:
        for call in body.recorded if body.is_checked else ():
            for index, leaf in enumerate(call):
                if isinstance(leaf, RecordedTensor) and leaf.twin is not None:
                    one, two = leaf_name(body, leaf.twin), leaf_name(body, index)
                    found[f"its arguments {one!r} and {two!r} were one tensor, and must be"] = None
    return list(found)


def leaf_name(body: Any, index: int) -> str:
    """Return how a caller of what runs ``body`` names a leaf of the arguments."""
    return path_of_leaf(body.signature, body.recorded[0], index)


def path_of_leaf(signature: CallSignature | None, examples: RecordedCall, index: int) -> str:
    """Return the name of a leaf of arguments that are structured so."""
    if signature is None:
        return f"argument {index}"
    labels = argument_labels(signature.in_spec, signature.names)
    return leaf_paths(signature.in_spec, labels, examples)[index]


def _are_structured_alike(
    one: Mapping[object, pytree.TreeSpec], other: Mapping[object, pytree.TreeSpec]
) -> bool:
    """Return whether some arguments may be given to either, by position or by name."""
    return list(one.values()) == list(other.values()) or one == other


def _have_calls_alike(one: Any, other: Any) -> bool:
    """Return whether some arguments fit a recorded call of either."""
    return any(
        len(call) == len(more) and all(map(_overlap, call, more))
        for call in one.recorded
        for more in other.recorded
    )


def _parts(body: Any) -> dict[object, pytree.TreeSpec]:
    """Return the structure of each argument, by its name or, where it has none, its place."""
    signature: CallSignature | None = body.signature
    if signature is None:
        count = len(body.recorded[0]) if body.recorded else 0
        return dict.fromkeys(range(count), pytree.tree_structure(None))
    parts = [spec for part in signature.in_spec.children() for spec in part.children()]
    return dict(zip(signature.names, parts, strict=True))


def _overlap(one: Recorded, other: Recorded) -> bool:
    if one is None or other is None:
        return True
    if not (isinstance(one, RecordedTensor) and isinstance(other, RecordedTensor)):
        return one == other
    return (
        one.dtype is other.dtype
        and len(one.shape) == len(other.shape)
        and all(
            None in sizes or sizes[0] == sizes[1]
            for sizes in zip(one.shape, other.shape, strict=True)
        )
    )


def _of_same_types(
    numbers: Sequence[int], bodies: Sequence[Any], leaves: Sequence[Sequence[Any] | None]
) -> list[int]:
    """Return those of the forms that were recorded with tensors of the types given."""

    def same(call: RecordedCall, given: Sequence[Any]) -> bool:
        return fits(call, given) and all(
            leaf.dtype == want.dtype
            for want, leaf in zip(call, given, strict=True)
            if isinstance(want, RecordedTensor) and not isinstance(leaf, Proxy)
        )

    return [
        number
        for number in numbers
        if any(same(call, leaves[number] or ()) for call in bodies[number].recorded)
    ]


def _leaves_of(
    signature: CallSignature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Any] | None:
    """Return the leaves of a call's arguments; None if they are not structured so."""
    if signature is None:
        return None if kwargs else list(args)
    keys = {variable: key for key, variable in signature.others}
    given = dict(zip(signature.names, args, strict=False))
    named = {name: kwargs[key] for name, key in _keywords(signature, keys) if key in kwargs}
    if len(args) > len(signature.names) or len(named) < len(kwargs) or given.keys() & named:
        return None
    given.update(named)
    parts = [spec for part in signature.in_spec.children() for spec in part.children()]
    found: list[Any] = []
    for name, spec in zip(signature.names, parts, strict=True):
        if name not in given:
            return None
        if spec.is_leaf():
            found.append(given[name])
            continue
        try:
            found += flatten_like(given[name], spec, name)
        except InputStructureError:
            return None
    return found


def _keywords(signature: CallSignature, keys: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, keys.get(name, name)) for name in signature.names)


def _shown(call: RecordedCall) -> str:
    return ", ".join("anything" if leaf is None else str(leaf) for leaf in call) or "no arguments"


def floating_types(calls: Sequence[RecordedCall]) -> set[torch.dtype]:
    """Return the types of floating tensors among the arguments of these calls."""
    return {
        leaf.dtype
        for call in calls
        for leaf in call
        if isinstance(leaf, RecordedTensor) and leaf.dtype.is_floating_point
    }
