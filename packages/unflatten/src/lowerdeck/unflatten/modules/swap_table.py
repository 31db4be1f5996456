"""Which modules of an unflattened program can be replaced and called alone, and why others not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from lowerdeck.unflatten._torch_private import children_of
from lowerdeck.unflatten.calls.carrying import PRIVATE
from lowerdeck.unflatten.calls.python_names import on_one_line
from lowerdeck.unflatten.modules.container import Container
from lowerdeck.unflatten.modules.generated_module import Body, GeneratedModule

NOT_REPLACEABLE = "lowerdeck_not_replaceable"
"""Where the meta of the outermost module has those in whose place no other one would be right."""

_FLAT = (
    "takes and returns flat values: the program does not tell its signature; export the model "
    "with export_preserving"
)
_LOSES_WRITES = (
    "called alone it would not change its argument in place, as eager's does: decomposing made a "
    "new value of that write. Unflatten the program before run_decompositions() to do that"
)
_UNCALLED = (
    "is called nowhere in this program, or computes nothing: another module in its place has no "
    "effect; export_preserving tells which"
)


@dataclass(frozen=True, slots=True)
class Swap:
    """What can be done with one module.

    Attributes:
        path: Its name.
        replaceable: Whether an eager module of the same signature may be put in its place.
        callable_alone: Whether it computes everything from its arguments and its own state, and
            does to its arguments what eager's does; then another module may be put around it too.
            Values that it computes for other modules stand beside its result.
        reason: Why one of these is not so; "" where both are.
    """

    path: str
    replaceable: bool
    callable_alone: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SwapTable(Sequence[Swap]):
    """A row for each module that the program calls, outer ones first; prints as a table.

    Attributes:
        rows: The rows.
    """

    rows: tuple[Swap, ...]

    @overload
    def __getitem__(self, index: int) -> Swap: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Swap, ...]: ...

    def __getitem__(self, index: int | slice) -> Swap | tuple[Swap, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        width = max((len(on_one_line(row.path)) for row in self.rows), default=0)
        return "\n".join(
            f"{on_one_line(row.path):<{width}}  {_mark(row.replaceable, 'replace')}  "
            f"{_mark(row.callable_alone, 'call')}  {on_one_line(row.reason)}".rstrip()
            for row in self.rows
        )


def _mark(can: bool, what: str) -> str:
    return what if can else "-" * len(what)


def swap_table(root: torch.nn.Module, meta: Mapping[str, Any]) -> SwapTable:
    """Return what can be done with each module under ``root``.

    Args:
        root: The outermost module.
        meta: Its metadata, which has the modules that are known not to be replaceable.
    """
    forbidden = meta.get(NOT_REPLACEABLE, {})
    recorded = root.__dict__["module_call_graph"]
    is_plain = all(entry.signature is None for entry in recorded if entry.fqn)
    return SwapTable(tuple(_rows(root, forbidden, is_plain=is_plain)))


def _rows(
    root: torch.nn.Module, forbidden: Mapping[str, str], *, is_plain: bool
) -> Iterator[Swap]:
    for path, module in root.named_modules():
        if path in forbidden and isinstance(module, Container):
            yield Swap(path, False, False, forbidden[path])
        elif is_plain and isinstance(module, Container) and not children_of(module):
            yield Swap(path, False, False, _UNCALLED)
        if not path or isinstance(module, Container):
            continue
        if not isinstance(module, GeneratedModule):
            yield Swap(path, replaceable=True, callable_alone=True)
            continue
        body: Body = module.__dict__[PRIVATE]
        signatures = [form.signature for form in (body, *body.others)]
        known = [signature for signature in signatures if signature is not None]
        carries = max((signature.carries for signature in known), default=0)
        carried = max((signature.carried for signature in known), default=0)
        if path in forbidden:
            yield Swap(path, False, not carried, forbidden[path])
        elif len(known) < len(signatures) or any(signature.flat for signature in known):
            yield Swap(path, False, not carried, _FLAT)
        elif carries:
            why = f"computes {carries} values that other modules read without being given them"
            yield Swap(path, False, not carried, why)
        elif carried:
            why = f"reads {carried} values that other modules compute and that are no arguments"
            yield Swap(path, True, False, why)
        elif any(signature.loses_writes for signature in known):
            yield Swap(path, True, False, _LOSES_WRITES)
        else:
            yield Swap(path, True, True)
