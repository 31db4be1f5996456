"""Match each event of a program with the eager operator that computes the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

import torch

from lowerdeck.runner.comparison.eager import EagerOp
from lowerdeck.runner.profile import Event

Pair = tuple[Event, EagerOp]

_FAMILIES = {
    "_conv_depthwise2d": "convolution",
    "_log_softmax_backward_data": "log_softmax_backward",
    "_native_batch_norm_legit": "batch_norm",
    "_native_batch_norm_legit_no_training": "batch_norm",
    "_reshape_alias": "view",
    "_safe_softmax": "softmax",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "_unsafe_view": "view",
    "addmm": "matmul",
    "bmm": "matmul",
    "clone_dim_order": "copy",
    "clone": "copy",
    "contiguous": "copy",
    "conv1d": "convolution",
    "conv2d": "convolution",
    "empty_dim_order": "empty",
    "et_view": "view",
    "flatten": "view",
    "linear": "matmul",
    "max_pool2d": "max_pool2d_with_indices",
    "mkldnn_convolution": "convolution",
    "mm": "matmul",
    "native_batch_norm": "batch_norm",
    "_batch_norm_no_update": "batch_norm",
    "reshape": "view",
    "slow_conv2d_forward": "convolution",
    "t": "permute",
    "thnn_conv2d": "convolution",
    "to_copy": "copy",
    "to_dim_order_copy": "copy",
    "transpose": "permute",
}
"""Operators that compute the same thing under several names."""

_FLATTENED = frozenset({"addmm", "linear", "mm"})
"""Operators that eager computes with outer dimensions flattened, and a kernel may not."""


_MOVERS = frozenset(
    {
        "copy",
        "expand",
        "permute",
        "select",
        "slice",
        "split_with_sizes",
        "squeeze",
        "unsqueeze",
        "view",
    }
)
"""Families that compute nothing: compilers put them in another order."""


def by_node(events: Sequence[Event], ops: Sequence[EagerOp]) -> list[Pair]:
    """Match each node with the last event that comes from it and has its shapes.

    An earlier event of these shapes may be an intermediate step, such as the softmax of an
    attention whose result is as wide as its scores.

    Args:
        events: Events of the program.
        ops: Results of the nodes of an exported program.
    """
    by_node = {op.node: op for op in ops}
    by_handle = {op.handle: op for op in ops if op.handle is not None}
    last: dict[str, Pair] = {}
    for event in events:
        op = _op_of(event, by_node, by_handle)
        if op is not None and tensors_of(event.values):
            last.pop(op.node, None)  # in the order of the last events
            last[op.node] = event, op
    return [pair for pair in last.values() if _gives_shapes(*pair)]


def _gives_shapes(event: Event, op: EagerOp) -> bool:
    """Return whether an event has the result shapes of an operator, and perhaps more."""
    values, expected = tensors_of(event.values)[: len(op.values)], op.values
    return bool(expected) and list(map(_rows, values)) == list(map(_rows, expected))


def _rows(value: torch.Tensor) -> tuple[int, ...]:
    """Return the shape with the outer dimensions flattened, as a kernel may take them."""
    *outer, last = value.shape or (1,)
    return math.prod(outer), last


def _op_of(
    event: Event, by_node: Mapping[str, EagerOp], by_handle: Mapping[int, EagerOp]
) -> EagerOp | None:
    if event.place.node in by_node:
        return by_node[event.place.node]
    return next((by_handle[h] for h in event.place.handles[-1:] if h in by_handle), None)


def by_order(events: Sequence[Event], ops: Sequence[EagerOp]) -> list[Pair]:
    """Match events and operators of the same kind, shape and module, in the order of both.

    If modules are unknown, or an event covers nodes of several, the longest common subsequences of
    kind and shape decide, unless the modules contradict them.

    Args:
        events: Events of the program.
    """
    ours = [event for event in _finished(events) if tensors_of(event.values)]
    theirs = [op for op in ops if op.values]
    pairs: list[Pair] = []
    if any(event.place.module_path for event in ours):
        pairs, ours, theirs = _by_module(ours, theirs)
    rest = _common(ours, theirs)
    pairs += [pair for pair in rest if _may_belong_together(*pair)]
    return sorted(pairs, key=lambda pair: pair[0].start_ns + pair[0].duration_ns)


def _by_module(
    events: Sequence[Event], ops: Sequence[EagerOp]
) -> tuple[list[Pair], list[Event], list[EagerOp]]:
    """Match modules with equally many operators in program and eager; return the rest."""
    ours: dict[tuple[object, ...], list[Event]] = {}
    theirs: dict[tuple[object, ...], list[EagerOp]] = {}
    for event in events:
        ours.setdefault((*_event_key(event), event.place.module_path), []).append(event)
    for op in ops:
        theirs.setdefault((*_op_key(op), op.module_path), []).append(op)
    pairs: list[Pair] = []
    for key in ours.keys() & theirs.keys():
        count = len(ours[key])
        if count == len(theirs[key]) and (count == 1 or key[0] not in _MOVERS):
            pairs += zip(ours[key], theirs[key], strict=True)
    # If the counts differ, it is unknown which ones are missing.
    settled = ours.keys() & theirs.keys()
    return (
        pairs,
        [e for e in events if (*_event_key(e), e.place.module_path) not in settled],
        [op for op in ops if (*_op_key(op), op.module_path) not in settled],
    )


def _common(events: Sequence[Event], ops: Sequence[EagerOp]) -> list[Pair]:
    matcher = SequenceMatcher(
        None, list(map(_event_key, events)), list(map(_op_key, ops)), autojunk=False
    )
    return [
        (events[block.a + i], ops[block.b + i])
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    ]


def _may_belong_together(event: Event, op: EagerOp) -> bool:
    """Return whether the modules of both, as far as known, can be the same."""
    paths = event.place.module_path.split("; ")
    if op.module_path is None or paths == [""]:
        return True
    # Operators outside of submodules are ignored if an event covers several nodes.
    return op.module_path in paths or any(
        path.startswith(f"{op.module_path}.") or not op.module_path for path in paths
    )


def same_kind(event: Event, op: EagerOp) -> bool:
    """Return whether an event and an eager operator may be the same by kind and shape.

    Args:
        event: An event of the program.
        op: An operator of eager. An addition of the shape of a matrix product may be the bias that
            eager adds to one.
    """
    kind, *shape = _event_key(event)
    if _op_key(op) == (kind, *shape):
        return True
    matrix = _short(_operator(event)) in _FLATTENED
    return matrix and _family(op.name) == "add" and _flat_shape(op.values) == tuple(shape)


def _flat_shape(values: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(_rows(value) for value in values[:1] if value.dim())


def _event_key(event: Event) -> tuple[object, ...]:
    return _key(_operator(event), tensors_of(event.values))


def _op_key(op: EagerOp) -> tuple[object, ...]:
    return _key(op.name, op.values)


def _key(name: str, values: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """Return a key that is equal for an event and its eager operator."""
    family, shapes = _family(name), _shapes(values)[:1]
    if _short(name) in _FLATTENED and shapes and shapes[0]:
        *outer, last = shapes[0]
        return family, (math.prod(outer), last)
    return family, *shapes


def _finished(events: Sequence[Event]) -> list[Event]:
    """Return ``events`` without the parts of a delegate that only prepare a node's result."""
    pairs = zip_longest(events, events[1:])
    return [
        event
        for event, following in pairs
        if event.identifier is None
        or following is None
        or (event.instruction, event.place) != (following.instruction, following.place)
    ]


def _operator(event: Event) -> str:
    """Return the operator of an event; for a part of a delegate, that of its source."""
    return event.name if event.identifier is None else event.place.operator


def _family(name: str) -> str:
    """Return a common name for all overloads of an operator.

    Args:
        name: Such as ``aten::add.out``, ``aten::add`` or ``aten.add.Tensor``.
    """
    short = _short(name)
    if short in _FAMILIES:
        return _FAMILIES[short]
    short = short.strip("_").removesuffix("_copy")
    return _FAMILIES.get(short, short)


def _short(name: str) -> str:
    return name.rpartition("::")[2].removeprefix("aten.").partition(".")[0]


def tensors_of(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among ``values``.

    Args:
        values: The results of an event.
    """
    return [value for value in values if isinstance(value, torch.Tensor)]


def _shapes(values: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in values]
