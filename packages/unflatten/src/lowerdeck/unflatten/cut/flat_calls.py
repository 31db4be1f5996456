"""Signatures of calls that export recorded none of: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch.fx import Node

from lowerdeck.torch_base import pytree
from lowerdeck.unflatten.calls.signature import CallSignature, named_arguments
from lowerdeck.unflatten.cut.own_sizes import ITEM
from lowerdeck.unflatten.cut.preserved import PreservedCall
from lowerdeck.unflatten.cut.working_graph import WorkingGraph, nodes_in
from lowerdeck.unflatten.trace.call_tree import Frame


def frames_without_signature(made: WorkingGraph) -> list[Frame]:
    """Return the calls that compute something and whose signature is not known."""
    return [
        frame
        for frame in made.tree.frames()
        if frame.parent is not None
        and not frame.part
        and frame not in made.preserved
        and any(True for _ in nodes_in(frame))
    ]


def result_alone(frame: Frame) -> PreservedCall:
    """Return a call of which only the result is known: what it computes last."""
    return PreservedCall(_signature(0, 1), (), (max(nodes_in(frame)),))


def flat_call(frame: Frame) -> PreservedCall:
    """Return the call that takes the tensors which ``frame`` reads, and returns what others read.

    Args:
        frame: The call. It takes tensors in the order of their first use, and returns them in the
            order in which they are computed.
    """
    inside = set(nodes_in(frame))
    inputs = tuple(dict.fromkeys(_taken(sorted(inside), inside)))
    outputs = tuple(
        node
        for node in sorted(inside)
        if _is_tensor(node) and any(user not in inside for user in node.users)
    )
    return PreservedCall(_signature(len(inputs), len(outputs)), inputs, outputs)


def _taken(nodes: list[Node], inside: Collection[Node]) -> Iterator[Node]:
    for node in nodes:
        for source in node.all_input_nodes:
            # A number is read out of its tensor again.
            found = source.args[0] if source.target is ITEM else source
            if source not in inside and isinstance(found, Node) and _is_tensor(found):
                yield found


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _signature(taken: int, returned: int) -> CallSignature:
    in_spec = pytree.tree_structure((tuple([0] * taken), {}))
    out_spec = pytree.tree_structure(0 if returned == 1 else tuple([0] * returned))
    names, others = named_arguments(in_spec, None)
    return CallSignature(in_spec, out_spec, names, others, flat=True)
