"""What differs between two programs: their methods side by side, and what they store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any

from lowerdeck.serializer.report.delegates import storage_size, storage_view
from lowerdeck.serializer.report.embed import clip
from lowerdeck.serializer.report.file_map import stored_names
from lowerdeck.serializer.report.lifetimes import steps
from lowerdeck.serializer.report.pairing import pair_rows
from lowerdeck.serializer.report.values import value_text
from lowerdeck.serializer.schema import (
    DelegateCall,
    ExecutionPlan,
    JumpFalseCall,
    KernelCall,
    MoveCall,
    Program,
    Storage,
)
from lowerdeck.serializer.storage import FileRange

_CHUNK = 1 << 20


def method_changes(old: Program, new: Program) -> list[dict[str, Any]]:
    """Return each method of either program with its instructions paired.

    Args:
        old: The program on the left.
        new: The program on the right.

    Returns:
        For each name the indices of the method (-1 for none) and the rows of
        :func:`.pair_rows`; instructions pair when operator and argument types are equal.
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
    """Return the constants, states, delegates and named blobs that are not the same in both.

    Args:
        old: The program on the left.
        new: The program on the right.

    Returns:
        Kind, name, ``change`` (``removed``, ``added`` or ``changed``) and both sizes, the largest
        first. Things pair by kind and name; the second of a name pairs with the second.
    """
    left, right = _by_name(old), _by_name(new)
    entries = []
    for key in [*left, *(key for key in right if key not in left)]:
        before, after = left.get(key), right.get(key)
        if before is not None and after is not None and _equal(before, after):
            continue
        change = "added" if before is None else "removed" if after is None else "changed"
        sizes = [storage_size(s) if s is not None else 0 for s in (before, after)]
        entries.append(
            {
                "kind": key[0],
                "name": clip(key[1]),
                "change": change,
                "old": sizes[0],
                "new": sizes[1],
            }
        )
    return sorted(entries, key=lambda entry: -max(entry["old"], entry["new"]))


def _keys(plan: ExecutionPlan) -> list[Hashable]:
    texts = [value_text(evalue.val, plan.values) for evalue in plan.values]

    def describe(values: list[int]) -> tuple[str, ...]:
        return tuple(texts[v] if 0 <= v < len(texts) else "?" for v in values)

    keys: list[Hashable] = []
    for step in steps(plan):
        match step:
            case KernelCall(operator, args):
                known = 0 <= operator < len(plan.operators)
                name = plan.operators[operator].full_name if known else f"operator {operator}"
                keys.append((name, describe(args)))
            case DelegateCall(delegate, args):
                known = 0 <= delegate < len(plan.delegates)
                name = plan.delegates[delegate].id if known else f"delegate {delegate}"
                keys.append(("delegate", name, describe(args)))
            case MoveCall(source, target):
                keys.append(("move", describe([source, target])))
            case JumpFalseCall(condition, _):
                keys.append(("jump", describe([condition])))
            case _:
                keys.append(("free",))
    return keys


def _by_name(program: Program) -> dict[tuple[str, str, int], Storage]:
    seen: defaultdict[tuple[str, str], int] = defaultdict(int)
    found = {}
    for kind, name, storage in _named_storages(program):
        found[kind, name, seen[kind, name]] = storage
        seen[kind, name] += 1
    return found


def _named_storages(program: Program) -> Iterator[tuple[str, str, Storage]]:
    storages: dict[str, list[Storage]] = {
        "constants": [buffer.storage for buffer in program.constant_buffer],
        "state": [buffer.storage for buffer in program.mutable_data],
        "delegate": [blob.data for blob in program.backend_delegate_data],
        "named": [named.data for named in program.named_data],
    }
    for kind, index, name in stored_names(program):
        yield kind, name, storages[kind][index]


def _equal(before: Storage, after: Storage) -> bool:
    if storage_size(before) != storage_size(after):
        return False
    if isinstance(before, FileRange) or isinstance(after, FileRange):
        return before == after
    left, right = storage_view(before), storage_view(after)
    # Chunk by chunk: comparing views walks item by item, comparing bytes does not.
    return all(
        bytes(left[start : start + _CHUNK]) == bytes(right[start : start + _CHUNK])
        for start in range(0, left.nbytes, _CHUNK)
    )
