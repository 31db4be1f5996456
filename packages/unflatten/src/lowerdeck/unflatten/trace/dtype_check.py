"""What becomes of export's checks that a tensor still has the type it was traced with.

Before each conversion such as ``x.float()`` export asserts the type of ``x``. Where the
conversion changed the type it is in the program, and right for any input: eager has no check
there, and it would forbid ``module.to(dtype)`` and autocast. Where it changed nothing, the program
holds no trace of it (or reads its result wherever eager reads ``x``). A module moved to another
type then computes in another precision than eager, so it says so.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

CHECK = torch.ops.aten._assert_tensor_metadata.default

_CONVERSIONS = {
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.dtype_layout,
    torch.ops.aten.to.device,
    torch.ops.aten.to.other,
    torch.ops.aten._to_copy.default,
}


def is_needless(check: Node, regions: Sequence[Node], *, autocasts: bool) -> bool:
    """Return whether a check of export's may be dropped.

    Args:
        check: A node whose target is ``CHECK``.
        regions: The operators in whose graphs it is, the outermost first.
        autocasts: Whether the program itself uses autocast.
    """
    value = check.args[0]
    if not isinstance(value, Node):
        return True
    following = check.next
    if following.target in _CONVERSIONS and value in following.all_input_nodes:
        made = following.meta.get("val")
        if made is None or made.dtype != _expected(check):
            return True
        if autocasts and _reads(following, regions) < 2:
            return True
    # A call that reads the value for nothing else would get an argument that eager's has not.
    stack = check.meta.get("nn_module_stack")
    others = (node for node in (value, *value.users) if node.target is not CHECK)
    return all(node.meta.get("nn_module_stack") != stack for node in others)


def _reads(value: Node, regions: Sequence[Node]) -> int:
    """Return how often the steps of a program read ``value``, outside of its regions too.

    What converted it to the type that it had is no reader: others read it through that.
    """
    count = 0
    for user in value.users:
        if user.target is CHECK:
            continue
        if user.target in _CONVERSIONS and _dtype(user) == _dtype(value):
            count += _reads(user, regions)
        elif user.op == "output" and regions:
            for part in _results(user, value, regions[-1]):
                count += _reads(part, regions[:-1])
        else:
            count += _occurrences(value, user)
    return count


def _results(output: Node, value: Node, region: Node) -> Iterator[Node]:
    """Yield the nodes outside of a region that take ``value`` out of it."""
    returned: Any = output.args[0]
    for user in region.users:
        if user.target is operator.getitem and returned[user.args[1]] is value:
            yield user


def _dtype(node: Node) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


def _occurrences(value: Node, user: Node) -> int:
    found: list[Any] = []
    map_aggregate((user.args, user.kwargs), lambda item: found.append(item is value))
    return sum(found)


def _expected(check: Node) -> Any:
    return check.kwargs.get("dtype", check.args[3] if len(check.args) > 3 else None)


def warn_of_other_dtype(
    value: torch.Tensor,
    size: object = None,  # noqa: ARG001
    stride: object = None,  # noqa: ARG001
    dtype: torch.dtype | None = None,
    *,
    device: object = None,  # noqa: ARG001
    layout: object = None,  # noqa: ARG001
) -> None:
    """Warn if ``value`` has another type than where the program was traced.

    Args:
        value: What eager converts here.
        size: Accepted for the operator's sake.
        stride: Accepted for the operator's sake.
        dtype: The type that the program was traced with.
        device: Accepted for the operator's sake: moving to another device is eager's right.
        layout: Accepted for the operator's sake.
    """
    if value.dtype is dtype or dtype is None or torch.compiler.is_compiling():
        return
    if isinstance(value, torch.fx.Proxy):
        # A symbolic trace does not know the type, and eager's holds no check either.
        return
    warnings.warn(
        f"Eager converts a value here that was {dtype} when the program was exported, so that the "
        f"conversion left no trace; found {value.dtype}. Results may differ from eager's in type "
        "and precision: export again from the module in its new type, and with strict=False where "
        "the model itself uses autocast, which strict export does not see.",
        UserWarning,
        stacklevel=2,
    )
