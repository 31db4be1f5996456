"""Offsets beyond 31 and 32 bits, in files that are mostly holes."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from serializer_sparse import write_huge  # type: ignore[import-not-found]

from lowerdeck.serializer import open_pte, verify_pte

GIB = 1 << 30


@pytest.mark.heavy
@pytest.mark.parametrize("filler", [2 * GIB + 100, 4 * GIB + 100])
def test_data_after_gigabytes_are_found(filler: int, tmp_path: Path) -> None:
    path, program = write_huge(tmp_path, filler)
    assert path.stat().st_size > filler
    with open_pte(path) as file:
        constants = file.constant_segment
        assert constants is not None
        assert constants.offsets[2] >= filler
        assert bytes(file.constants[2].storage) == program.constant_buffer[2].storage  # type: ignore[arg-type]
        (named,) = file.named_data
        assert bytes(named.data) == b"behind everything"  # type: ignore[arg-type]
    with path.open("rb") as raw:
        mapped = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
    # The map goes with the last view on it.
    assert verify_pte(mapped).execution_plan == program.execution_plan


def test_a_megabyte_of_filler_behaves_the_same(tmp_path: Path) -> None:
    path, program = write_huge(tmp_path, 1 << 20)
    assert verify_pte(path.read_bytes()).execution_plan == program.execution_plan
