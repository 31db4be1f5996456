"""What two calls must have in common for the same source to be right for both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.graph_fuser import OutlinePlan, Region

_BY_VALUE = frozenset({bool, int, str, torch.device})
_BY_SPELLING = frozenset({float, complex})


def region_structure(
    plan: OutlinePlan, region: Region, targets: Mapping[Region, str]
) -> tuple[object, ...]:
    """Return a key that is equal for regions whose graphs are written as the same source.

    It is many times cheaper than graph and source. Names of nodes do not count, nor do example
    values; the model's own lines do, as they become comments. Keys are to be compared while the
    program lives, for some objects are known by their identity.

    Args:
        plan: What outlining would make.
        region: The region of the call.
        targets: How the code names the calls that this one makes.
    """
    inputs = plan.inputs(region)
    numbers: dict[Node, int] = {node: number for number, node in enumerate(inputs)}
    found: list[object] = [len(inputs)]
    for node, path in plan.attributes(region).items():
        numbers[node] = len(numbers)
        found.append(path)
    for step in plan.steps(region):
        if isinstance(step, Region):
            taken = (numbers[node] for node in plan.inputs(step))
            found.append((targets[step], plan.returns_bare(step), *taken))
            for node in plan.outputs(step):
                numbers[node] = len(numbers)
            continue
        meta = step.meta
        found.append(
            (
                step.op,
                # By identity: hashing an operator is a call into Python.
                id(step.target) if step.op == "call_function" else step.target,
                None if step.type is None else id(step.type),
                meta.get("stack_trace"),
                "closes" in meta,
                _frozen(step.kwargs, numbers) if step.kwargs else None,
                *(_frozen(value, numbers) for value in step.args),
            )
        )
        numbers[step] = len(numbers)
    returned = (numbers[node] for node in plan.outputs(region))
    found.append((plan.returns_bare(region), *returned))
    return tuple(found)


def _frozen(value: Any, numbers: Mapping[Node, int]) -> object:
    """Return a hashable stand-in for an argument: a bare number for a node, else with its type."""
    if isinstance(value, Node):
        return numbers[value]
    kind = type(value)
    if value is None or kind in _BY_VALUE:
        return (kind, value)
    if kind in _BY_SPELLING:
        # Zeros of both signs are equal, but not the same.
        return (kind, repr(value))
    if isinstance(value, (tuple, list)):
        return (kind, *(_frozen(item, numbers) for item in value))
    if isinstance(value, dict):
        return (kind, *value, *(_frozen(item, numbers) for item in value.values()))
    if isinstance(value, slice):
        return (kind, *(_frozen(part, numbers) for part in (value.start, value.stop, value.step)))
    return (kind, id(value))
