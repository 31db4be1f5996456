"""Metadata of values, without that of their operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node

OPERATION_KEYS = frozenset(
    {
        "ac_graph_id",
        "autograd_backward",
        "debug_handle",
        "eager_input_vals",
        "from_node",
        "original_aten",
        "partitioner_tag",
        "recompute",
        "seq_nr",
        "source_fn_stack",
        "source_fn",
        "torch_fn",
        "unbacked_bindings",
    }
)
"""Keys that describe the operation, not valid on nodes that only forward the value.

``stack_trace`` and ``nn_module_stack`` record the origin of the value, so inputs and calls keep
them, as in torch.
"""

_VALUE_KEYS = ("val", "example_value")


def value_meta(meta: Mapping[str, object]) -> dict[str, object]:
    """Return the part of ``meta`` that describes the value."""
    return {key: value for key, value in meta.items() if key not in OPERATION_KEYS}


def call_meta(outputs: Sequence[Node], *, bare: bool) -> dict[str, object]:
    """Return the meta of a call that returns ``outputs``; omit keys absent from all outputs.

    Args:
        bare: Whether the call returns its single output without a tuple.
    """
    if bare:
        return value_meta(outputs[0].meta)
    meta: dict[str, object] = {}
    for key in _VALUE_KEYS:
        if any(key in node.meta for node in outputs):
            meta[key] = tuple(node.meta.get(key) for node in outputs)
    # Passes read ``val`` of every call, even without results.
    if not outputs:
        meta["val"] = ()
    return meta
