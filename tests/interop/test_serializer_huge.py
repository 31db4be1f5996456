"""Offsets beyond 31 and 32 bits, in files that are mostly holes."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from lowerdeck.serializer import (
    Buffer,
    FileRange,
    NamedData,
    Program,
    open_pte,
    verify_pte,
    write_pte,
)
from lowerdeck_files.programs import add_program
from lowerdeck_zoo import official

GIB = 1 << 30


class SparseFile:
    """A file open for writing that skips over zeros."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, data: memoryview) -> int:
        if bytes(data).count(0) == len(data):
            self._file.seek(len(data), 1)
        else:
            self._file.write(data)
        return len(data)

    def close(self) -> None:
        self._file.truncate()
        self._file.close()


def write_huge(folder: Path, filler: int) -> tuple[Path, Program]:
    """Write the program ``x + weight`` with ``filler`` zeros before its weight, and return it."""
    zeros = folder / "zeros.bin"
    with zeros.open("wb") as file:
        file.truncate(filler)
    program: Program = add_program()
    program.constant_buffer.insert(1, Buffer(FileRange(zeros, 0, filler)))
    program.execution_plan[0].values[1].val.data_buffer_idx = 2  # type: ignore[union-attr]
    program.named_data.append(NamedData("behind", b"behind everything", 64))
    out = SparseFile(folder / "huge.pte")
    write_pte(program, out)  # type: ignore[arg-type]
    out.close()
    return folder / "huge.pte", program


HUGE = [pytest.param(size * GIB + 100, marks=pytest.mark.heavy) for size in (2, 4)]


@pytest.mark.parametrize("filler", [1 << 20, *HUGE])
def test_data_behind_gigabytes_are_found(filler: int, tmp_path: Path) -> None:
    path, program = write_huge(tmp_path, filler)
    with open_pte(path) as file:
        assert file.constant_segment is not None
        assert file.constant_segment.offsets[2] >= filler
        assert bytes(file.constants[2].storage) == program.constant_buffer[2].storage  # type: ignore[arg-type]
        assert [bytes(one.data) for one in file.named_data] == [b"behind everything"]  # type: ignore[arg-type]
    with path.open("rb") as raw:
        mapped = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
    assert verify_pte(mapped).execution_plan == program.execution_plan
    outcome = official.run(path, [official.Call((torch.zeros(2, 3),))], timeout=300.0)
    assert isinstance(outcome, official.Ran), outcome
    weight = torch.frombuffer(bytearray(range(24)), dtype=torch.float32).reshape(2, 3)
    assert torch.equal(outcome.outputs[0][0], weight)
