"""Files of every date are read and verified as they were, and rewritten to the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_frozen import everything

from lowerdeck.serializer import (
    deserialize_ptd,
    deserialize_pte,
    serialize_ptd,
    serialize_pte,
    verify_pte,
)

HERE = Path(__file__).resolve().parent / "serializer"
PROGRAMS = sorted(HERE.glob("*/*.pte"))
DATA = sorted(HERE.glob("*/*.ptd"))


def _name(path: Path) -> str:
    return f"{path.parent.name}-{path.name}"


@pytest.mark.parametrize("path", PROGRAMS, ids=_name)
def test_frozen_programs_are_read_and_rewritten(path: Path) -> None:
    data = path.read_bytes()
    assert verify_pte(data) == deserialize_pte(data)
    assert serialize_pte(deserialize_pte(data)) == data


@pytest.mark.parametrize("path", [p for p in PROGRAMS if p.name != "flatbuffer.pte"], ids=_name)
def test_frozen_programs_mean_what_they_meant(path: Path) -> None:
    found, expected = deserialize_pte(path.read_bytes()), everything()
    assert found.execution_plan == expected.execution_plan
    assert found.constant_buffer == expected.constant_buffer
    assert found.mutable_data == expected.mutable_data
    assert found.backend_delegate_data == expected.backend_delegate_data
    assert [(entry.key, entry.data) for entry in found.named_data] == [
        (entry.key, entry.data) for entry in expected.named_data
    ]


@pytest.mark.parametrize("path", DATA, ids=_name)
def test_frozen_data_are_read_and_rewritten(path: Path) -> None:
    data = path.read_bytes()
    found = deserialize_ptd(data)
    assert found.entries["w"].data == bytes(range(24))
    assert found.entries["blob"].data == b"opaque"
    assert serialize_ptd(found) == data


def test_there_are_frozen_files() -> None:
    assert PROGRAMS
    assert DATA
