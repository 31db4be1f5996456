"""Match the events of a program with equivalent eager operators."""

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
"""Canonical names of equivalent operators."""

_FLATTENED = frozenset({"addmm", "linear", "mm"})
"""Operators whose outer dimensions eager flattens and a kernel may keep."""


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
"""Families that only move data; compilers reorder them."""


def by_node(events: Sequence[Event], ops: Sequence[EagerOp]) -> list[Pair]:
    """Return pairs of each node and its last event, if their shapes agree.

    An earlier event may be an intermediate result of equal shape, such as the softmax of an
    attention.

    Args:
        ops: Recorded nodes of an exported program.
    """
    by_node = {op.node: op for op in ops}
    by_handle = {op.handle: op for op in ops if op.handle is not None}
    last: dict[str, Pair] = {}
    for event in events:
        op = _op_of(event, by_node, by_handle)
        if op is not None and tensors_of(event.values):
            last.pop(op.node, None)  # keep the order of last events
            last[op.node] = event, op
    return [pair for pair in last.values() if _gives_shapes(*pair)]


def _gives_shapes(event: Event, op: EagerOp) -> bool:
    """Return whether an event's leading results have the shapes of an operator's."""
    values, expected = tensors_of(event.values)[: len(op.values)], op.values
    return bool(expected) and list(map(_rows, values)) == list(map(_rows, expected))


def _rows(value: torch.Tensor) -> tuple[int, ...]:
    """Return the shape with outer dimensions flattened, as kernels may do."""
    *outer, last = value.shape or (1,)
    return math.prod(outer), last


def _op_of(
    event: Event, by_node: Mapping[str, EagerOp], by_handle: Mapping[int, EagerOp]
) -> EagerOp | None:
    if event.place.node in by_node:
        return by_node[event.place.node]
    return next((by_handle[h] for h in event.place.handles[-1:] if h in by_handle), None)


def by_order(events: Sequence[Event], ops: Sequence[EagerOp]) -> list[Pair]:
    """Return pairs of events and operators of equal kind, shape and module, in order.

    If the module is unknown or ambiguous, pairs are common subsequences of kind and shape whose
    known modules are compatible.
    """
    ours = [event for event in _finished(events) if tensors_of(event.values)]
    theirs = [op for op in ops if op.values]
    pairs: list[Pair] = []
    if any(event.place.module_path for event in ours):
        pairs, ours, theirs = _by_module(ours, theirs)
    remaining = _common(ours, theirs)
    pairs += [pair for pair in remaining if _may_belong_together(*pair)]
    return sorted(pairs, key=lambda pair: pair[0].start_ns + pair[0].duration_ns)


def _by_module(
    events: Sequence[Event], ops: Sequence[EagerOp]
) -> tuple[list[Pair], list[Event], list[EagerOp]]:
    """Return pairs from modules with equal operator counts, and unmatched events and operators."""
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
    # Keys with different counts are dropped: it is unknown which operators are missing.
    shared_keys = ours.keys() & theirs.keys()
    return (
        pairs,
        [e for e in events if (*_event_key(e), e.place.module_path) not in shared_keys],
        [op for op in ops if (*_op_key(op), op.module_path) not in shared_keys],
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
    """Return whether the known modules of both are compatible."""
    paths = event.place.module_path.split("; ")
    if op.module_path is None or paths == [""]:
        return True
    # Enclosing modules are compatible: paths of an event with several nodes omit the root.
    return op.module_path in paths or any(
        path.startswith(f"{op.module_path}.") or not op.module_path for path in paths
    )


def same_kind(event: Event, op: EagerOp) -> bool:
    """Return whether an event and an eager operator agree in kind and shape.

    Args:
        op: An addition agrees with a matrix product of its shape, whose bias it may add.
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
    """Return a key of kind and shape, equal for an event and its eager operator."""
    family, shapes = _family(name), _shapes(values)[:1]
    if _short(name) in _FLATTENED and shapes and shapes[0]:
        *outer, last = shapes[0]
        return family, (math.prod(outer), last)
    return family, *shapes


def _finished(events: Sequence[Event]) -> list[Event]:
    """Return ``events`` without a node's intermediate results in a delegate."""
    pairs = zip_longest(events, events[1:])
    return [
        event
        for event, following in pairs
        if event.identifier is None
        or following is None
        or (event.instruction, event.place) != (following.instruction, following.place)
    ]


def _operator(event: Event) -> str:
    """Return the operator of an event, or of its source node for events in a delegate."""
    return event.name if event.identifier is None else event.place.operator


def _family(name: str) -> str:
    """Return the canonical name of an operator's overloads.

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
    """Return the tensors among ``values``."""
    return [value for value in values if isinstance(value, torch.Tensor)]


def _shapes(values: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in values]
