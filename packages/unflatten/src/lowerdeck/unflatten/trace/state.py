"""Parameters, buffers and constants: copied without copying their memory, sharing kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from lowerdeck.torch_base import OwnCopies, storage_identity
from lowerdeck.unflatten._torch_private import is_wrapped_by_transform
from lowerdeck.unflatten.errors import UnsupportedProgramError


class StateKind(Enum):
    """How a module holds a value."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    TRANSIENT_BUFFER = "non-persistent buffer"
    CONSTANT = "constant"


class StateEntry(NamedTuple):
    """One name of the state.

    Attributes:
        name: Qualified name.
        kind: How the module that owns it holds it.
        identity: Equal for two names of one tensor.
        value: The program's own value.
    """

    name: str
    kind: StateKind
    identity: object
    value: Any


class ProgramState:
    """The state of a program, by name and by the placeholder that reads it.

    Attributes:
        entries: Every name of the state, in eager's order within each module.
        targets: From the name of a placeholder to the name of the state that it stands for.
    """

    def __init__(self, program: ExportedProgram) -> None:
        self.entries: dict[str, StateEntry] = {}
        self.targets: dict[str, str] = {}
        transient = set()
        for spec in program.graph_signature.input_specs:
            if spec.kind in _STATE_KINDS and spec.target is not None:
                self.targets[spec.arg.name] = spec.target
                if spec.kind is InputKind.BUFFER and not spec.persistent:
                    transient.add(spec.target)
        buffers = set(program.graph_signature.buffers)
        found: dict[str, tuple[StateKind, Any]] = {}
        for name, value in program.state_dict.items():
            is_parameter = isinstance(value, torch.nn.Parameter) and name not in buffers
            found[name] = (StateKind.PARAMETER if is_parameter else StateKind.BUFFER, value)
        for name, value in program.constants.items():
            if name not in found:
                kind = StateKind.TRANSIENT_BUFFER if name in transient else StateKind.CONSTANT
                found[name] = (kind, value)
        self._enter(found)
        self._order_buffers(program)
        self._names: dict[object, list[str]] = {}
        for entry in self.entries.values():
            self._names.setdefault(entry.identity, []).append(entry.name)

    def _enter(self, found: Mapping[str, tuple[StateKind, Any]]) -> None:
        memories = {name: _memory(value) for name, (_, value) in found.items()}
        readers = Counter(memories.values())
        for name, (kind, value) in found.items():
            memory = memories[name]
            if memory is None and is_wrapped_by_transform(value):
                raise UnsupportedProgramError(
                    f"expected constants that are plain tensors; found {name!r}, which has no "
                    "values of its own: torch.export kept it of a call of torch.func.vjp, jacrev "
                    "or grad, and such a program does not run. Export the model without that call."
                )
            # A tensor that has its memory to itself is known by that.
            alone = memory is not None and readers[memory] == 1
            identity = memory if alone else tensor_identity(value)
            self.entries[name] = StateEntry(name, kind, identity, value)

    def _order_buffers(self, program: ExportedProgram) -> None:
        """Put buffers, persistent or not, in eager's order where the program recorded it.

        Non-strict export lifts all buffers in eager's order. Strict export lifts those that it
        reads in the order in which it reads them, so that nothing tells where the others were.
        """
        held = {StateKind.BUFFER, StateKind.TRANSIENT_BUFFER}
        buffers = [name for name, entry in self.entries.items() if entry.kind in held]
        order = [name for name in program.graph_signature.buffers if name in self.entries]
        saved = program.state_dict
        # Modules need not be in eager's order there.
        one, two = (
            sorted((name for name in names if name in saved), key=lambda x: x.rpartition(".")[0])
            for names in (buffers, order)
        )
        if len(order) != len(buffers) or one != two:
            return
        for name in order:
            self.entries[name] = self.entries.pop(name)

    def names_of(self, placeholder: str) -> list[str]:
        """Return every name of the state that a placeholder stands for, its own name first."""
        return self.aliases(self.targets[placeholder])

    def aliases(self, target: str) -> list[str]:
        """Return every name of the tensor that ``target`` names, that one first."""
        entry = self.entries.get(target)
        if entry is None:
            return [target]
        return [target, *(name for name in self._names[entry.identity] if name != target)]

    def has_aliases(self) -> bool:
        """Return whether any tensor has two names."""
        return len(self._names) < len(self.entries)

    def add_name(self, name: str, entry: StateEntry) -> None:
        """Add a further name of the tensor that ``entry`` names."""
        self.entries[name] = entry._replace(name=name)
        self._names[entry.identity].append(name)

    def rename(self, placeholder: str, name: str) -> None:
        """Let ``placeholder`` stand for the state ``name``; what it stood for has no name more."""
        entry = self.entries.pop(self.targets[placeholder])
        self._names[entry.identity].remove(entry.name)
        self.targets[placeholder] = name

    def copies(self) -> Iterator[tuple[StateEntry, Any]]:
        """Yield each entry with a value of our own; names of one tensor get one object."""
        own = OwnCopies(entry.value for entry in self.entries.values())
        made: dict[object, Any] = {}
        for entry in self.entries.values():
            if entry.identity not in made:
                made[entry.identity] = own.of(entry.value)
            yield entry, made[entry.identity]


_STATE_KINDS = {
    InputKind.PARAMETER,
    InputKind.BUFFER,
    InputKind.CONSTANT_TENSOR,
    InputKind.CUSTOM_OBJ,
}


def tensor_identity(value: Any) -> object:
    """Return a key that is equal for two views of the same memory that read it alike.

    A loaded program holds two objects where the saved one held one tensor under two names, so the
    object alone does not tell.
    """
    memory = _memory(value)
    if memory is None:
        return id(value)
    return (
        memory,
        value.dtype,
        tuple(value.shape),
        value.stride(),
        value.storage_offset(),
        value.is_conj(),
        value.is_neg(),
        value.requires_grad,
        isinstance(value, torch.nn.Parameter),
        # Tensors without elements share a null pointer, not memory.
        id(value) if not value.numel() else None,
    )


def _memory(value: Any) -> int | None:
    """Return a key of the memory that a plain tensor reads, or None for any other value."""
    if not _is_plain(value):
        return None
    try:
        return storage_identity(value)
    except NotImplementedError:
        return None


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN and value.layout is torch.strided and not value.is_quantized
