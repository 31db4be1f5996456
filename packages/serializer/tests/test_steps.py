"""No small file takes long: work grows with the size of a file, whatever is in it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

import pytest
from serializer_attacks import ATTACKS  # type: ignore[import-not-found]
from serializer_constructions import Construction, of_schema  # type: ignore[import-not-found]
from serializer_steps import StepCounter  # type: ignore[import-not-found]

from lowerdeck import serializer as pte
from lowerdeck.serializer.commands.extract import parts_of
from lowerdeck.serializer.commands.inspect import summary_lines
from lowerdeck.serializer.commands.summary import summarise
from lowerdeck.serializer.report.changes import method_changes, stored_changes
from lowerdeck.serializer.report.pairing import pair_rows

_SIZE = 2_000
_ATTACK_SIZE = 12_000
_DOUBLED = 2.3
_STEPS_PER_BYTE = 320
_MOST_DOUBLINGS = 6


def _inspect(data: bytes) -> None:
    summary = summarise(pte.PteFile(data))
    list(summary_lines("file", summary))
    json.dumps(summary)


def _differ(data: bytes) -> None:
    program = pte.deserialize_pte(data)
    other = pte.Program(execution_plan=program.execution_plan[:1])
    method_changes(program, other)
    stored_changes(program, other)


def _look_at_everything(data: bytes) -> None:
    file = pte.PteFile(data)
    list(parts_of(file))
    for name in dir(pte.PteFile):
        if isinstance(getattr(pte.PteFile, name), property):
            getattr(file, name)


_OPERATIONS: dict[str, Callable[[bytes], object]] = {
    "read": pte.deserialize_pte,
    "verify": lambda data: pte.verify_pte(data, on_hazard=id),
    "inspect": _inspect,
    "report": lambda data: pte.html_report(pte.PteFile(data)),
    "diff": _differ,
    "look": _look_at_everything,
    "rewrite": lambda data: pte.serialize_pte(pte.deserialize_pte(data)),
}
_EXTERNAL: dict[str, Callable[[bytes], object]] = {
    "read": pte.deserialize_ptd,
    "rewrite": lambda data: pte.serialize_ptd(pte.deserialize_ptd(data)),
}
CONSTRUCTIONS: dict[str, Construction] = {**dict(of_schema()), **ATTACKS}
# CI tries all attacks, and a fifth of the other constructions that depends on the date.
_TURN = int(time.time() // 86_400) % 5
_TRIED = [
    name
    for number, name in enumerate(CONSTRUCTIONS)
    if name in ATTACKS or number % 5 == _TURN or os.environ.get("LOWERDECK_NIGHTLY")
]


def _count_for(make: Construction, size: int) -> int:
    """Return the number for which a construction has about a size."""
    growth = (len(make(256)) - len(make(128))) / 128
    return max(int(size / growth), 16) // 8 * 8


@pytest.mark.parametrize("name", _TRIED)
def test_twice_the_file_takes_twice_the_steps(name: str) -> None:
    make = CONSTRUCTIONS[name]
    count = _count_for(make, _ATTACK_SIZE if name in ATTACKS else _SIZE)
    files = [make(count)]
    operations = _EXTERNAL if files[0][4:8] == b"FT01" else _OPERATIONS
    steps = {
        what: [StepCounter().count(lambda: do(files[0]), pte.FormatError, pte.ProgramError)]  # noqa: B023
        for what, do in operations.items()
    }
    # What refers to one thing many times may grow faster, until the limit on that ends it:
    # within the bound a byte, and not for ever.
    growing = list(operations)
    while growing:
        files.append(make(count << len(files)))
        for what in growing:
            do = operations[what]
            now = StepCounter().count(lambda: do(files[-1]), pte.FormatError, pte.ProgramError)  # noqa: B023
            steps[what].append(now)
            assert now <= _STEPS_PER_BYTE * len(files[-1]), f"{what}: {now} steps"
        growth = len(files[-1]) / len(files[-2]) / 2
        growing = [
            what for what in growing if steps[what][-1] > _DOUBLED * growth * steps[what][-2]
        ]
        told = {what: steps[what] for what in growing}
        assert len(files) < _MOST_DOUBLINGS or not growing, f"{told} for {list(map(len, files))}"


def test_pairing_takes_steps_in_proportion_to_its_items() -> None:
    # Each split leaves one item that occurs once, at the very end of what is left.
    def peeled(count: int) -> list[list[int]]:
        pairs = [number for i in range(count, 0, -1) for number in (i + 1, i)]
        return [[-1, *pairs, -2], [-3, *pairs, -4]]

    counts = [StepCounter().count(lambda: pair_rows(*peeled(n))) for n in (2000, 4000)]  # noqa: B023
    assert counts[1] <= _DOUBLED * counts[0]
