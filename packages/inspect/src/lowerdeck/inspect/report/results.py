"""Results among the arguments of a kernel call."""

from __future__ import annotations

from collections.abc import Sequence

from lowerdeck.serializer import ExecutionPlan, OptionalTensorList, TensorList


def result_count(plan: ExecutionPlan, args: Sequence[int]) -> int:
    """Return the number of a kernel's results, which are its last arguments.

    The last argument is the return value. The out arguments before it are the same value, or the
    members of a list; an in-place kernel has none.

    Args:
        args: Value indices of the call's arguments.
    """
    if not args:
        return 0
    members = list_members(plan, args[-1]) or (args[-1],)
    # A list with more members than the call has arguments is skipped: it may be long.
    if len(members) >= len(args):
        return 1
    before = args[-1 - len(members) : -1]
    return 1 + len(members) if list(before) == list(members) else 1


def list_members(plan: ExecutionPlan, index: int) -> Sequence[int]:
    """Return the values in a list of tensors; none for any other value.

    Args:
        index: Index of the value; may be out of range.
    """
    if 0 <= index < len(plan.values):
        value = plan.values[index].val
        if isinstance(value, TensorList | OptionalTensorList):
            return value.items
    return ()
