"""Check that delegates do not embed state of other methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowerdeck.emitter.errors import UnsupportedError
from lowerdeck.emitter.frontend.state_sharing import MUTATIONS
from lowerdeck.emitter.traced import TracedProgram
from lowerdeck.torch_base import (
    Extent,
    MemoryMap,
    attribute_of,
    executorch_call_delegate,
    graphs_of,
)


def check_delegate_constants(programs: Mapping[str, TracedProgram]) -> None:
    """Check that no delegate embeds state that another method uses or mutates.

    Delegates without an ``original_module`` cannot be checked.

    Raises:
        UnsupportedError: A delegate embeds a buffer that another method mutates, or mutates its
            copy of one that another method uses.
    """
    used = [_Shared.of(name, exported) for name, exported in programs.items()]
    for method, exported in programs.items():
        for call, name, tensor, changes in _held(exported):
            for other in used:
                if other.method == method and changes:
                    continue
                if other.has(name, tensor, written=not changes):
                    raise UnsupportedError(
                        f"method {method!r}: delegate {call!r} holds {name!r} "
                        f"{'and changes it' if changes else 'as a constant'}, but method "
                        f"{other.method!r} {'uses' if changes else 'changes'} it too, and their "
                        "copies would diverge: lower the methods in one call (to_backend with a "
                        "MethodProgramsPartitionerSpec), leave the buffer untagged, or rename "
                        "one if they are unrelated"
                    )


@dataclass(frozen=True, slots=True)
class _Shared:
    """Tensors of the model's state that a method and its delegates use.

    Attributes:
        used: All tensors, by name, with their memory.
        written: The mutated ones.
    """

    method: str
    used: tuple[dict[str, torch.Tensor], MemoryMap]
    written: tuple[dict[str, torch.Tensor], MemoryMap]

    @classmethod
    def of(cls, method: str, exported: TracedProgram) -> _Shared:
        used = {
            str(spec.target): value
            for node, spec in zip(
                exported.graph.find_nodes(op="placeholder"),
                exported.graph_signature.input_specs,
                strict=True,
            )
            if node.users and isinstance(value := _tensor(exported, spec.target), torch.Tensor)
        }
        written = dict(_written(exported))
        for _, name, value, changes in _held(exported):
            used[name] = value
            if changes:
                written[name] = value
        return cls(method, _mapped(used | written), _mapped(written))

    def has(self, name: str, tensor: torch.Tensor, *, written: bool) -> bool:
        """Return whether ``tensor`` aliases one of these, or equals the one of this name."""
        names, memory = self.written if written else self.used
        if name in names and _equal(names[name], tensor):
            # State is copied if a method is loaded or lowered separately.
            return True
        return bool(names) and memory.find(Extent.of(tensor)) is not None


def _mapped(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], MemoryMap]:
    return tensors, MemoryMap(map(Extent.of, tensors.values()))


def _written(exported: TracedProgram) -> Iterator[tuple[str, torch.Tensor]]:
    for spec in exported.graph_signature.output_specs:
        value = _tensor(exported, spec.target) if spec.kind in MUTATIONS else None
        if isinstance(value, torch.Tensor):
            yield str(spec.target), value


def _tensor(exported: TracedProgram, name: str | None) -> Any:
    return exported.state_dict.get(str(name), exported.constants.get(str(name)))


def _held(exported: TracedProgram) -> Iterator[tuple[str, str, torch.Tensor, bool]]:
    """Yield the tensors in delegates: call, name, tensor, and whether the delegate mutates it."""
    for gm in graphs_of(exported.graph_module):
        for node in gm.graph.nodes:
            if node.op != "call_function" or node.target is not executorch_call_delegate:
                continue
            delegate = attribute_of(gm, node.args[0])
            original = getattr(delegate, "original_module", None)
            if not isinstance(original, torch.export.ExportedProgram):
                continue
            changed = {name for name, _ in _written(TracedProgram.of(original))}
            for name, value in (*original.state_dict.items(), *original.constants.items()):
                if isinstance(value, torch.Tensor):
                    yield node.name, name, value, name in changed


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype is right.dtype and left.shape == right.shape and torch.equal(left, right)
