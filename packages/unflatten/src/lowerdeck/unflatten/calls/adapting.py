"""Take the leaves of a call whose arguments may have another structure than the exported ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Proxy

from lowerdeck.torch_base import pytree
from lowerdeck.unflatten.calls.flat_args import FlatArgsAdapter
from lowerdeck.unflatten.errors import InputStructureError

ADAPTER = "flat_args_adapter"
"""The attribute of the outermost module that adapts its arguments."""


def adapted_arguments(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    expected: pytree.TreeSpec,
) -> list[Any]:
    """Return the leaves of a call, through the adapter where the structure is another one.

    Args:
        module: The outermost module.
        args: Positional arguments.
        kwargs: Keyword arguments, in any order.
        expected: The exported structure.

    Raises:
        InputStructureError: The structure is another one, and there is no way to adapt it.
    """
    if isinstance(args, Proxy):
        raise InputStructureError(
            "A symbolic trace gives all arguments of this module as one Proxy; found no way "
            "to tell how many they are. Give concrete_args as a tuple with torch.fx.PH for "
            "each."
        )
    names = expected.child(1).context
    if kwargs and set(kwargs) == set(names):
        kwargs = {name: kwargs[name] for name in names}
    leaves, found = pytree.tree_flatten((args, kwargs))
    if found == expected:
        return leaves
    # The model may have state of these names, which an attribute access would find.
    adapter: FlatArgsAdapter | None = module.__dict__[ADAPTER]
    if adapter is None:
        raise InputStructureError(
            "The arguments have another structure than the program was exported with: "
            f"found {found}, "
            f"expected {expected}. Pass the exported structure, or give unflatten a "
            "flat_args_adapter."
        )
    leaves = adapter.adapt(
        target_spec=expected,
        input_spec=found,
        input_args=leaves,
        metadata=module.__dict__["meta"],
        obj=args,
    )
    if len(leaves) != expected.num_leaves:
        raise InputStructureError(
            f"{type(adapter).__name__}.adapt returned {len(leaves)} arguments; expected "
            f"{expected.num_leaves}, one for each leaf of {expected}."
        )
    return leaves
