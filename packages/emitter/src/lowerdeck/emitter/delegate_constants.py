"""Whether a delegate took for a constant what another method changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lowerdeck.emitter._torch_private import is_delegate_call
from lowerdeck.emitter.errors import UnsupportedError
from lowerdeck.emitter.state_sharing import MUTATIONS
from lowerdeck.emitter.traced import TracedProgram
from lowerdeck.torch_base import Extent, MemoryMap, attribute, graphs_of


def check_delegate_constants(programs: Mapping[str, TracedProgram]) -> None:
    """Refuse methods of which one has compiled into a delegate what another one writes.

    Methods that are lowered one by one cannot know of each other. A delegate need not tell what
    it was made of; one that has an ``original_module`` does.

    Args:
        programs: All methods of one program.

    Raises:
        UnsupportedError: A delegate holds the value that a buffer had when it was compiled.
    """
    written = {
        name: tensor
        for exported in programs.values()
        for name, tensor in _written(exported)
        if isinstance(tensor, torch.Tensor)
    }
    if not written:
        return
    memory = MemoryMap(Extent.of(tensor) for tensor in written.values())
    for method, exported in programs.items():
        for call, name, tensor in _constants(exported):
            state = written.get(name)
            # A copy of the state, as loading a method by itself makes one, has its name and value.
            copied = state is not None and _equal(state, tensor)
            if copied or memory.find(Extent.of(tensor)) is not None:
                raise UnsupportedError(
                    f"method {method!r}: delegate {call!r} holds {name!r} as a constant, but a "
                    "method changes it, which the delegate would not see: lower the methods in "
                    "one call (to_backend with a MethodProgramsPartitionerSpec), leave the "
                    "buffer untagged, or rename one of two that only happen to be alike"
                )


def _written(exported: TracedProgram) -> Iterator[tuple[str, Any]]:
    for spec in exported.graph_signature.output_specs:
        if spec.kind in MUTATIONS and spec.target is not None:
            found = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
            yield spec.target, found


def _constants(exported: TracedProgram) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield the tensors that delegates hold and do not change, with call and name."""
    for gm in graphs_of(exported.graph_module):
        for node in gm.graph.nodes:
            if node.op != "call_function" or not is_delegate_call(node.target):
                continue
            delegate = attribute(gm, str(node.args[0].target))
            original = getattr(delegate, "original_module", None)
            if not isinstance(original, torch.export.ExportedProgram):
                continue
            own = {name for name, _ in _written(TracedProgram.of(original))}
            for name, value in (*original.state_dict.items(), *original.constants.items()):
                if isinstance(value, torch.Tensor) and name not in own:
                    yield node.name, name, value


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(one, other)
