"""Everything private in torch that this package needs, so that a new torch breaks one file."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lowerdeck.torch_base import FakeTensor, FakeTensorMode, pytree

__all__ = [
    "active_fake_mode",
    "fake_mode_of",
    "graph_pickler",
    "new_fake_mode",
]


def active_fake_mode() -> FakeTensorMode | None:
    """Return the fake mode that the running operator is under, or None."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return cast("FakeTensorMode | None", mode)


def fake_mode_of(values: object) -> FakeTensorMode | None:
    """Return the fake mode that the fake tensors among ``values`` belong to, or None."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, FakeTensor):
            return leaf.fake_mode
    return None


def new_fake_mode() -> FakeTensorMode:
    """Return a fake mode as programs have it, without symbols yet."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def graph_pickler() -> tuple[Any, Any, Any, Any]:
    """Return torch's pickler of graphs, its options, its unpickler, and the state of one."""
    # Imported here: it brings inductor, and takes twice as long as torch.export.
    from torch.fx import _graph_pickler as torchs

    return torchs.GraphPickler, torchs.Options, torchs._GraphUnpickler, torchs._UnpickleState
