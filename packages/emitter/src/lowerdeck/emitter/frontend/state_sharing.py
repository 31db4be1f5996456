"""Buffers that several methods share as one state, by memory or by the user's setting.

A state is a block of memory that any method writes. It is not identified by name: two models may
both have a buffer called ``cache``, and two names may refer to one buffer. If two methods of one
model were saved and loaded separately, only the names are left, and the user decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias, TypeGuard

import torch
from torch.export.graph_signature import InputKind, OutputKind

from lowerdeck.emitter.errors import UnsupportedError
from lowerdeck.emitter.frontend.tensors import layout_of
from lowerdeck.emitter.traced import TracedProgram
from lowerdeck.torch_base import Extent, FakeTensor, MemoryMap

_HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
MUTATIONS = (
    OutputKind.BUFFER_MUTATION,
    OutputKind.USER_INPUT_MUTATION,
    OutputKind.PARAMETER_MUTATION,
)
_CURE = "pass shared_state=True to emit if both are one state, else rename one of them"


StateKeys: TypeAlias = Mapping[tuple[str, str], str]
"""The key of each state by method and by name in the model: one name, the same in all methods."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A tensor of a method."""

    method: str
    name: str
    tensor: torch.Tensor
    mutated: bool
    memory: Extent

    @property
    def label(self) -> str:
        return f"{self.name!r} of method {self.method!r}"


_Groups: TypeAlias = dict[Extent, list[_Member]]


def find_states(programs: Mapping[str, TracedProgram], *, by_name: bool) -> StateKeys:
    """Return the state that each name means, for memory that any method writes.

    A method that only reads such memory must see what another one has written.

    Args:
        programs: All methods of one program.
        by_name: Whether equal names are one state although their memories differ.

    Raises:
        UnsupportedError: One name refers to two memories, or two names cannot be one state.
    """
    members = [member for name in sorted(programs) for member in _members(name, programs[name])]
    groups: _Groups = {}
    for member in members:
        groups.setdefault(member.memory, []).append(member)
    _check_overlaps(groups)
    names = {member.name for group in _written(groups) for member in group}
    for name in sorted(names):
        _join(name, groups, by_name=by_name)
    keys: dict[tuple[str, str], str] = {}
    for group in _written(groups):
        _check_forms(group)
        # Of several names, the first writer's in order of methods: the same in every process.
        key = next(member.name for member in group if member.mutated)
        keys |= {(member.method, member.name): key for member in group}
    return keys


def _check_overlaps(groups: _Groups) -> None:
    """Reject parts of a tensor, and arrays of numpy, that overlap where a method writes one."""
    memory = MemoryMap(groups)
    together: dict[Extent | None, list[_Member]] = {}
    for extent, group in groups.items():
        together.setdefault(memory.find(extent), []).extend(group)
    for group in together.values():
        others = [member for member in group if member.memory != group[0].memory]
        if others and any(member.mutated for member in group):
            raise UnsupportedError(
                f"{group[0].label} and {others[0].label} are different parts of one memory, and a "
                "method writes it, which torch's graph does not show: use one buffer in the "
                "model, or copy one"
            )


def _distinct(groups: _Groups) -> Iterable[list[_Member]]:
    """Return each group once, although several memories may refer to it."""
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
    for name, tensor in {**exported.constants, **exported.state_dict}.items():
        if name in used and _has_memory(tensor):
            yield _Member(method, name, tensor, name in mutated, Extent.of(tensor))


def _has_memory(tensor: Any) -> TypeGuard[torch.Tensor]:
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
        return False
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _join(name: str, groups: _Groups, *, by_name: bool) -> None:
    """Make the groups that have ``name`` one state, if the user's setting says so."""
    apart = [group for group in _distinct(groups) if any(m.name == name for m in group)]
    first, *others = (next(m for m in group if m.name == name) for group in apart)
    for other, group in zip(others, apart[1:], strict=True):
        if not by_name:
            raise UnsupportedError(
                f"{first.label} and {other.label} have different memory, and a method writes one "
                f"of them; {_CURE}"
            )
        _check_alike(first, other)
        apart[0].extend(group)
        for memory, roots in groups.items():
            if roots is group:
                groups[memory] = apart[0]


def _check_forms(group: list[_Member]) -> None:
    """Reject names of one memory with different forms, or two of one method, which writes one."""
    for first, second in combinations(group, 2):
        a, b = first.tensor, second.tensor
        if first.method == second.method and (first.mutated or second.mutated):
            raise UnsupportedError(
                f"{first.label} and {second.label} cannot be one state: they are two in the "
                "graph of that method, where a write to one does not change the other; use "
                "one buffer in the model"
            )
        alike = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        if first.memory == second.memory and not alike:
            raise UnsupportedError(
                f"{first.label} and {second.label} are different views of one memory, and a "
                "method writes it: use one buffer in the model"
            )


def _check_alike(first: _Member, second: _Member) -> None:
    a, b = first.tensor, second.tensor
    if a.dtype != b.dtype or a.shape != b.shape or layout_of(a) != layout_of(b):
        raise UnsupportedError(
            f"{first.label} is a {a.dtype} tensor of shape {tuple(a.shape)}, {second.label} a "
            f"{b.dtype} tensor of shape {tuple(b.shape)}; one state has one form: rename one"
        )
    if not torch.equal(_bytes(a), _bytes(b)):
        raise UnsupportedError(
            f"{first.label} and {second.label} are to be one state, but begin with other values; "
            "give both the same values before export, or rename one of them"
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)
