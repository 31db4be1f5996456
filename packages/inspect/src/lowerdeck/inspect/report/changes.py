"""Differences between two programs: their methods and their stored data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from hashlib import blake2b
from typing import Any

from lowerdeck.inspect.report.embed import clip
from lowerdeck.inspect.report.file_map import Stored, all_stored
from lowerdeck.inspect.report.lifetimes import callee, steps
from lowerdeck.inspect.report.pairing import pair_rows
from lowerdeck.inspect.report.values import value_text
from lowerdeck.serializer import (
    DelegateCall,
    ExecutionPlan,
    FileRange,
    JumpFalseCall,
    KernelCall,
    MoveCall,
    OptionalTensorList,
    Program,
    Storage,
    TensorList,
    resident_view,
    storage_size,
)

_MOST_MEMBERS = 16


def method_changes(old: Program, new: Program) -> list[dict[str, Any]]:
    """Return each method of either program with its instructions paired.

    Returns:
        For each method name the indices in both programs (-1 for none) and the rows of
        :func:`.pair_rows`. Instructions are paired if their operators and argument types are
        equal.
    """
    left = {plan.name: index for index, plan in enumerate(old.execution_plan)}
    right = {plan.name: index for index, plan in enumerate(new.execution_plan)}
    changes = []
    for name in [*left, *(name for name in right if name not in left)]:
        a, b = left.get(name, -1), right.get(name, -1)
        keys = [
            _keys(program.execution_plan[index]) if index >= 0 else []
            for program, index in ((old, a), (new, b))
        ]
        changes.append({"name": clip(name), "old": a, "new": b, "rows": pair_rows(*keys)})
    return changes


def stored_changes(old: Program, new: Program) -> list[dict[str, Any]]:
    """Return the differing constants, states, delegates and named blobs.

    Entries of equal kind, name and bytes count as unchanged. Other entries are ``changed`` if both
    programs have one of this kind and name.

    Returns:
        Kind, name, ``change`` (``removed``, ``added`` or ``changed``) and both sizes, the largest
        first.
    """
    left, right = _left_over(_by_content(old), _by_content(new))
    entries = []
    for item in left:
        waiting = right.get((item.kind, item.name)) if item.name is not None else None
        partner = waiting.pop() if waiting else None
        change = "removed" if partner is None else "changed"
        entries.append(_change(item, change, item, partner))
    for items in right.values():
        entries += [_change(item, "added", None, item) for item in items]
    return sorted(entries, key=lambda entry: -max(entry["old"], entry["new"]))


_Key = tuple[str, str | None, object]


def _by_content(program: Program) -> dict[_Key, list[Stored]]:
    """Return the stored data of a program by kind, name and digest."""
    items: defaultdict[_Key, list[Stored]] = defaultdict(list)
    # Entries of the same range of a file share one view, which is read once.
    digests: dict[int, object] = {}
    for item in all_stored(program):
        if id(item.storage) not in digests:
            digests[id(item.storage)] = _digest(item.storage)
        items[item.kind, item.name, digests[id(item.storage)]].append(item)
    return items


def _left_over(
    old: dict[_Key, list[Stored]], new: dict[_Key, list[Stored]]
) -> tuple[list[Stored], dict[tuple[str, str | None], list[Stored]]]:
    """Return the entries of one program only; those of ``new`` by kind and name, last first."""
    left = [item for key, items in old.items() for item in items[len(new.get(key, ())) :]]
    right: dict[tuple[str, str | None], list[Stored]] = {}
    for key, items in new.items():
        right.setdefault(key[:2], []).extend(items[len(old.get(key, ())) :])
    for items in right.values():
        items.reverse()
    return left, right


def _change(
    stored: Stored, change: str, before: Stored | None, after: Stored | None
) -> dict[str, Any]:
    return {
        "kind": stored.kind,
        "name": clip(stored.label),
        "change": change,
        "old": storage_size(before.storage) if before is not None else 0,
        "new": storage_size(after.storage) if after is not None else 0,
    }


def _digest(storage: Storage) -> object:
    if isinstance(storage, FileRange):
        return storage
    return blake2b(resident_view(storage), digest_size=16).digest()


def _keys(plan: ExecutionPlan) -> list[Hashable]:
    texts = [value_text(evalue.val, plan.values) for evalue in plan.values]
    for index, evalue in enumerate(plan.values):
        # Value indices differ between programs: describe members by their types.
        if isinstance(evalue.val, TensorList | OptionalTensorList):
            members = evalue.val.items[:_MOST_MEMBERS]
            parts = [texts[m] if 0 <= m < index else "None" for m in members]
            texts[index] = f"{len(evalue.val.items)} of {parts}"

    def describe(values: list[int]) -> tuple[str, ...]:
        return tuple(texts[v] if 0 <= v < len(texts) else "?" for v in values)

    keys: list[Hashable] = []
    for step in steps(plan):
        match step:
            case KernelCall(_, args) | DelegateCall(_, args):
                keys.append((callee(plan, step), describe(args)))
            case MoveCall(source, target):
                keys.append(("move", describe([source, target])))
            case JumpFalseCall(condition, _):
                keys.append(("jump", describe([condition])))
            case _:
                keys.append(("free",))
    return keys
