"""Signatures of calls that export recorded none of: flat values in, flat values out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.fx import Node

from lowerdeck.torch_base import pytree
from lowerdeck.unflatten.calls.signature import CallSignature, named_arguments
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
    """Return the call that takes the tensors which ``frame`` reads, and returns those others read.

    Args:
        frame: The call. It takes values in the order of their first use, and returns them in the
            order in which they are computed. It does not take what it asks for sizes alone:
            export asks the outermost module's arguments for those of all that are made of them.
    """
    call = _call(frame, _is_tensor)
    computing = {node for node in nodes_in(frame) if _computes(node)}
    inputs = tuple(
        leaf for leaf in call.nodes(call.inputs) if not computing.isdisjoint(leaf.users)
    )
    return replace(call, signature=_signature(len(inputs), len(call.outputs)), inputs=inputs)


def with_other_values(frame: Frame) -> PreservedCall:
    """Return the call that takes and returns what is no tensor too.

    To be asked for once sizes are computed: only numbers that the tensors do not tell are left.
    """
    return _call(frame, lambda _: True)


def _call(frame: Frame, is_passed: Callable[[Node], bool]) -> PreservedCall:
    inside = set(nodes_in(frame))
    order = sorted(inside)
    # What is asked for its size is not used yet.
    used = sorted(order, key=lambda node: not _computes(node))
    read = dict.fromkeys(source for node in used for source in node.all_input_nodes)
    inputs = tuple(node for node in read if node not in inside and is_passed(node))
    outputs = tuple(
        node
        for node in order
        if is_passed(node) and any(user not in inside for user in node.users)
    )
    return PreservedCall(_signature(len(inputs), len(outputs)), inputs, outputs)


def _computes(user: Node) -> bool:
    return user.target is not torch.ops.aten.sym_size.int


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _signature(taken: int, returned: int) -> CallSignature:
    in_spec = pytree.tree_structure((tuple([0] * taken), {}))
    out_spec = pytree.tree_structure(0 if returned == 1 else tuple([0] * returned))
    names, others = named_arguments(in_spec, None)
    return CallSignature(in_spec, out_spec, names, others, flat=True)
