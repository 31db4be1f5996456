"""Find state that methods share, by memory or by the user's setting.

A state is a block of memory that any method writes. Names do not identify it: two models may both
have a buffer called ``cache``, and two names may alias. For methods of one model that were saved
and loaded separately the user must decide, because only the names are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import torch
from torch.export.graph_signature import InputKind, OutputKind

from lowerdeck.emitter.errors import EmitterError, UnsupportedError
from lowerdeck.emitter.frontend.shared_names import SharedNames
from lowerdeck.emitter.frontend.tensors import layout_of
from lowerdeck.emitter.traced import TracedProgram
from lowerdeck.torch_base import Extent, FakeTensor, MemoryMap, data_address

_HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
MUTATIONS = (
    OutputKind.BUFFER_MUTATION,
    OutputKind.USER_INPUT_MUTATION,
    OutputKind.PARAMETER_MUTATION,
)
_CURE = "pass shared_state=[{name!r}] to emit if both are one state, else rename one of them"


@dataclass(frozen=True, slots=True)
class StateView:
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


@dataclass(frozen=True, slots=True)
class _Member:
    """A tensor of a method, with its name."""

    method: str
    name: str
    tensor: torch.Tensor
    mutated: bool
    used: bool = True

    @property
    def memory(self) -> tuple[str, int]:
        tensor = self.tensor
        start = data_address(tensor) - int(tensor.storage_offset()) * tensor.element_size()
        return (str(tensor.device), start)

    @property
    def extent(self) -> tuple[int, int]:
        """The first byte and the end of its bytes in its memory."""
        tensor, size = self.tensor, self.tensor.element_size()
        first = int(tensor.storage_offset())
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = first + sum((count - 1) * stride for count, stride in steps)
        return first * size, (last + 1) * size

    @property
    def label(self) -> str:
        return f"{self.name!r} of method {self.method!r}"


_Groups: TypeAlias = dict[tuple[str, int], list[_Member]]


def find_states(programs: Mapping[str, TracedProgram], shared: SharedNames) -> StateViews:
    """Return the view of each name of each method that aliases written memory.

    Reads are included: a method must observe the writes of others.

    Args:
        shared: Names of one state with several copies.

    Raises:
        EmitterError: ``shared`` names no state, or one that no second method has.
        UnsupportedError: One name refers to two memories, or two views cannot be one state.
    """
    all_members = [
        member for name in sorted(programs) for member in _members(name, programs[name])
    ]
    members = [member for member in all_members if member.used]
    groups: _Groups = {}
    for member in members:
        groups.setdefault(member.memory, []).append(member)
    _check_storages(members)
    names = {member.name for group in _written(groups) for member in group}
    for one_state in shared.sets:
        _join_named(one_state, all_members, groups)
    for name in sorted(names):
        _join(name, groups, shared)
    views: dict[tuple[str, str], StateView] = {}
    for group in _written(groups):
        views |= _views(group)
    return views


def _check_storages(members: list[_Member]) -> None:
    """Reject tensors of two storages that overlap in memory, such as arrays of numpy."""
    extents = {member: Extent.of(member.tensor) for member in members}
    memory = MemoryMap(extents.values())
    together: dict[Extent | None, list[_Member]] = {}
    for member, extent in extents.items():
        together.setdefault(memory.find(extent), []).append(member)
    for group in together.values():
        others = [member for member in group if member.memory != group[0].memory]
        if others and any(member.mutated for member in group):
            raise UnsupportedError(
                f"{group[0].label} and {others[0].label} overlap in memory of two storages, "
                "and a method writes it, which torch's graph does not show: make both views of "
                "one tensor in the model, or copy one"
            )


def _distinct(groups: _Groups) -> Iterable[list[_Member]]:
    """Return the groups without duplicates: several memories may map to one group."""
    return [group for memory, group in groups.items() if group[0].memory == memory]


def _written(groups: _Groups) -> Iterable[list[_Member]]:
    return [group for group in _distinct(groups) if any(member.mutated for member in group)]


def _members(method: str, exported: TracedProgram) -> Iterable[_Member]:
    signature = exported.graph_signature
    mutated = {spec.target for spec in signature.output_specs if spec.kind in MUTATIONS}
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    used: set[str | None] = {
        spec.target
        for node, spec in zip(placeholders, signature.input_specs, strict=True)
        if spec.kind in _HELD and (node.users or spec.target in mutated)
    }
    # Unread buffers matter only as aliases of used ones.
    for name, tensor in {**exported.constants, **exported.state_dict}.items():
        if _has_memory(tensor):
            yield _Member(method, name, tensor, name in mutated, name in used)


def _has_memory(tensor: Any) -> TypeGuard[torch.Tensor]:
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
        return False
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _join_named(names: frozenset[str], members: list[_Member], groups: _Groups) -> None:
    """Merge the groups that have one of ``names``, including names of unread buffers.

    Raises:
        EmitterError: A name is unknown, or only one method has it.
    """
    sorted_names = sorted(names)
    here = [member for member in members if member.name in names and member.memory in groups]
    memories = {member.memory for member in here}
    apart = [group for memory, group in groups.items() if memory in memories]
    unknown = sorted(names - {member.name for member in here})
    written = sorted({member.name for group in _written(groups) for member in group})
    if unknown or not any(member.mutated for group in apart for member in group):
        raise EmitterError(
            f"shared_state names {unknown or sorted_names}, but no method mutates such a tensor; "
            f"the states are {written}"
        )
    owners = {(member.method, member.name) for group in apart for member in group}
    if len(owners) < 2:
        ((method, name),) = owners
        raise EmitterError(
            f"shared_state names {sorted_names}, but only method {method!r} has that state, as "
            f"{name!r}: add the other name; the states are {written}"
        )
    _unite(apart, groups)


def _join(name: str, groups: _Groups, shared: SharedNames) -> None:
    """Merge the groups that have ``name`` if the user's setting allows it, else reject them."""
    apart = [group for group in _distinct(groups) if any(m.name == name for m in group)]
    if len(apart) > 1 and not shared.every:
        first, second = (next(m for m in group if m.name == name) for group in apart[:2])
        raise UnsupportedError(
            f"{first.label} and {second.label} have different memory, and a method writes one of "
            f"them; {_CURE.format(name=name)}"
        )
    _unite(apart, groups)


def _unite(apart: list[list[_Member]], groups: _Groups) -> None:
    """Merge groups into one state."""
    if len(apart) < 2:
        return
    first, *others = apart
    for group in others:
        if group is first:
            continue
        _check_alike(*_pair(first, group))
        _check_methods(first, group)
        first += group
        for memory, roots in groups.items():
            if roots is group:
                groups[memory] = first


def _pair(first: list[_Member], group: list[_Member]) -> tuple[_Member, _Member]:
    """Return two members to compare, of the same name if possible."""
    named = {member.name: member for member in first}
    for member in group:
        if member.name in named:
            return named[member.name], member
    return first[0], group[0]


def _check_methods(first: list[_Member], group: list[_Member]) -> None:
    """Reject a state with two copies in one method, whose graph treats them as independent."""
    for mine in first:
        for other in group:
            if mine.method == other.method and (mine.mutated or other.mutated):
                raise UnsupportedError(
                    f"{mine.label} and {other.label} cannot be one state: in the graph of that "
                    "method a write to one does not change the other; use one buffer in the "
                    "model"
                )


def _check_alike(first: _Member, second: _Member) -> None:
    a, b = first.tensor, second.tensor
    if a.dtype != b.dtype or a.shape != b.shape or layout_of(a) != layout_of(b):
        raise UnsupportedError(
            f"{first.label} is a {a.dtype} tensor of shape {tuple(a.shape)}, {second.label} a "
            f"{b.dtype} tensor of shape {tuple(b.shape)}; they cannot be one state: rename one"
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
    """Return the views of one state."""
    # The name in the first method that writes the state, which is deterministic.
    key = next(member.name for member in group if member.mutated)
    low: dict[tuple[str, int], int] = {}
    high: dict[tuple[str, int], int] = {}
    for member in group:
        start, stop = member.extent
        low[member.memory] = min(start, low.get(member.memory, start))
        high[member.memory] = max(stop, high.get(member.memory, stop))
    _check_writes(group)
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


def _check_writes(group: list[_Member]) -> None:
    """Reject a method that writes one view while another view covers the same bytes."""
    for written in group:
        for other in group:
            together = (written.method, written.memory) == (other.method, other.memory)
            if written is other or not written.mutated or not together:
                continue
            (a, b), (c, d) = written.extent, other.extent
            if a < d and c < b:
                raise UnsupportedError(
                    f"{written.label} and {other.label} overlap in memory, and the method writes "
                    "the first; the graph does not update the second: use one buffer in the model"
                )


def _labels(group: list[_Member]) -> str:
    return " and ".join(sorted({member.label for member in group}))
