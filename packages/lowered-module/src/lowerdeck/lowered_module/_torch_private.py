"""All private names of torch that this package uses."""

from __future__ import annotations

from typing import Any, cast

import torch

from lowerdeck.torch_base import FakeTensor, FakeTensorMode, pytree

__all__ = [
    "active_fake_mode",
    "fake_mode_of",
    "graph_pickler",
    "new_fake_mode",
]


def active_fake_mode() -> FakeTensorMode | None:
    """Return the active fake mode, or None."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return cast("FakeTensorMode | None", mode)


def fake_mode_of(values: object) -> FakeTensorMode | None:
    """Return the fake mode of the fake tensors among ``values``, or None."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, FakeTensor):
            return leaf.fake_mode
    return None


def new_fake_mode() -> FakeTensorMode:
    """Return a fake mode with a new shape environment."""
    # Imported here: it loads sympy (0.3 s).
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def graph_pickler() -> tuple[Any, Any, Any, Any]:
    """Return torch's graph pickler, its options, its unpickler and the unpickler's state."""
    # Imported here: it imports inductor.
    from torch.fx import _graph_pickler as torchs

    return torchs.GraphPickler, torchs.Options, torchs._GraphUnpickler, torchs._UnpickleState
