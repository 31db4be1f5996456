"""Find state that methods share, by memory or by equal names if the user allows it.

A state is a block of memory that any method writes. Names do not identify it: two models may both
have a buffer called ``cache``, and two names may alias. Methods of one model that were saved and
loaded separately have no common memory, only equal names: the user must decide whether these share
state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from lowerdeck.emitter.errors import UnsupportedError
from lowerdeck.emitter.frontend.tensors import layout_of
from lowerdeck.torch_base import FakeTensor, data_address

_HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
MUTATIONS = (
    OutputKind.BUFFER_MUTATION,
    OutputKind.USER_INPUT_MUTATION,
    OutputKind.PARAMETER_MUTATION,
)


class StateView(NamedTuple):
    """View of a state under one name in one method.

    Attributes:
        key: Name of the state, the same in all methods.
        memory: All bytes of the state, None if the tensor covers all of it.
        offset: Offset in bytes into ``memory``.
    """

    key: str
    memory: torch.Tensor | None = None
    offset: int = 0


StateViews: TypeAlias = Mapping[tuple[str, str], StateView]
"""The view of each state by method and by name in the model."""


class _Member(NamedTuple):
    """A tensor of a method, with its name."""

    method: str
    name: str
    tensor: torch.Tensor
    mutated: bool

    @property
    def memory(self) -> tuple[str, int]:
        tensor = self.tensor
        start = data_address(tensor) - int(tensor.storage_offset()) * tensor.element_size()
        return (str(tensor.device), start)

    @property
    def extent(self) -> tuple[int, int]:
        """The start and the end of the tensor's bytes in its memory."""
        tensor, size = self.tensor, self.tensor.element_size()
        first = int(tensor.storage_offset())
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = first + sum((count - 1) * stride for count, stride in steps)
        return first * size, (last + 1) * size

    @property
    def label(self) -> str:
        return f"{self.name!r} of method {self.method!r}"


_Groups: TypeAlias = dict[tuple[str, int], list[_Member]]


def find_states(programs: Mapping[str, ExportedProgram], *, by_name: bool) -> StateViews:
    """Return the view of each tensor that aliases mutated memory, by method and name.

    Tensors that a method only reads are included: it must observe the writes of other methods.

    Args:
        programs: The decomposed program of each method.
        by_name: Whether equal names are one state in all methods, also in different memories.

    Raises:
        UnsupportedError: One name refers to two memories, or two views cannot be one state.
    """
    groups: _Groups = {}
    for name in sorted(programs):
        for member in _members(name, programs[name]):
            groups.setdefault(member.memory, []).append(member)
    names = {member.name for group in _written(groups) for member in group}
    for name in sorted(names):
        _join(name, groups, by_name=by_name)
    views: dict[tuple[str, str], StateView] = {}
    for group in _written(groups):
        views |= _views(group)
    return views


def _distinct(groups: _Groups) -> Iterable[list[_Member]]:
    """Return each group once: several memories may map to one group."""
    return [group for memory, group in groups.items() if group[0].memory == memory]


def _written(groups: _Groups) -> Iterable[list[_Member]]:
    return [group for group in _distinct(groups) if any(member.mutated for member in group)]


def _members(method: str, exported: ExportedProgram) -> Iterable[_Member]:
    signature = exported.graph_signature
    mutated = {spec.target for spec in signature.output_specs if spec.kind in MUTATIONS}
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    used: set[str | None] = {
        spec.target
        for node, spec in zip(placeholders, signature.input_specs, strict=True)
        if spec.kind in _HELD and (node.users or spec.target in mutated)
    }
    for name, tensor in {**exported.constants, **exported.state_dict}.items():
        if name in used and _has_memory(tensor):
            yield _Member(method, name, tensor, name in mutated)


def _has_memory(tensor: Any) -> TypeGuard[torch.Tensor]:
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
        return False
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _join(name: str, groups: _Groups, *, by_name: bool) -> None:
    """Merge the groups that have ``name`` if the user's setting allows it, else reject them."""
    apart = [group for group in _distinct(groups) if any(m.name == name for m in group)]
    first, *others = apart
    one = next(member for member in first if member.name == name)
    for group in others:
        other = next(member for member in group if member.name == name)
        if not by_name:
            raise UnsupportedError(
                f"{one.label} and {other.label} have different memory, and a method writes one of "
                "them; pass shared_state=True to emit or lower if buffers of equal name are one "
                "state, else rename one of them"
            )
        _check_alike(one, other)
        first += group
        for memory, members in groups.items():
            if members is group:
                groups[memory] = first


def _check_alike(first: _Member, second: _Member) -> None:
    a, b = first.tensor, second.tensor
    if a.dtype != b.dtype or a.shape != b.shape or layout_of(a) != layout_of(b):
        raise UnsupportedError(
            f"{first.label} is a {a.dtype} tensor of shape {tuple(a.shape)} and dim order "
            f"{layout_of(a)}, {second.label} a {b.dtype} tensor of shape {tuple(b.shape)} and dim "
            f"order {layout_of(b)}; they cannot be one state: rename one"
        )
    if not torch.equal(_bytes(a), _bytes(b)):
        raise UnsupportedError(
            f"{first.label} and {second.label} cannot be one state: their initial values differ; "
            "make them equal before export, or rename one"
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _views(group: list[_Member]) -> dict[tuple[str, str], StateView]:
    """Return the view of each member of one state, keyed by method and name."""
    # The name in the first method that writes the state, which is deterministic.
    key = next(member.name for member in group if member.mutated)
    low: dict[tuple[str, int], int] = {}
    high: dict[tuple[str, int], int] = {}
    for member in group:
        start, stop = member.extent
        low[member.memory] = min(start, low.get(member.memory, start))
        high[member.memory] = max(stop, high.get(member.memory, stop))
    if _same_form(group):
        return {(m.method, m.name): StateView(key) for m in group}
    if len({high[memory] - low[memory] for memory in low}) > 1:
        raise UnsupportedError(
            f"{_labels(group)} are one state, but their memories differ in size; share all views "
            "of that memory by name, or none"
        )
    for member in group:
        order = layout_of(member.tensor)
        if not member.tensor.permute(order).is_contiguous():
            raise UnsupportedError(
                f"{_labels(group)} are views of one memory that a method writes, and "
                f"{member.label} is not contiguous, as views of a state must be"
            )
    first = group[0]
    start, stop = low[first.memory], high[first.memory]
    storage = first.tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=first.tensor.device)
    memory.set_(storage, start, (stop - start,))  # type: ignore[call-overload]
    return {(m.method, m.name): StateView(key, memory, m.extent[0] - low[m.memory]) for m in group}


def _same_form(group: list[_Member]) -> bool:
    """Return whether all names of a state refer to the same elements."""
    forms = {(m.tensor.dtype, m.tensor.shape, layout_of(m.tensor)) for m in group}
    elements = {(m.memory, m.extent, m.tensor.stride()) for m in group}
    return len(forms) == 1 and len(elements) == len({m.memory for m in group})


def _labels(group: list[_Member]) -> str:
    return " and ".join(sorted({member.label for member in group}))
