"""Programs of gigabytes that take no space: zeros become holes in files."""

from __future__ import annotations

from pathlib import Path

from serializer_programs import add_program  # type: ignore[import-not-found]

from lowerdeck.serializer import Buffer, FileRange, NamedData, Program, write_pte


class SparseFile:
    """A file open for writing that skips over zeros."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, data: memoryview) -> int:
        """Write some bytes, or skip them if all of them are zeros."""
        if bytes(data).count(0) == len(data):
            self._file.seek(len(data), 1)
        else:
            self._file.write(data)
        return len(data)

    def close(self) -> None:
        """Give the file its full size."""
        self._file.truncate()
        self._file.close()


def write_huge(folder: Path, filler: int) -> tuple[Path, Program]:
    """Write the program ``x + weight`` with ``filler`` bytes of other data before its weight.

    Args:
        folder: Where to put the file.
        filler: How many bytes of zeros.

    Returns:
        The path, and the program as it was written.
    """
    zeros = folder / "zeros.bin"
    with zeros.open("wb") as file:
        file.truncate(filler)
    program: Program = add_program()
    weight = program.constant_buffer.pop()
    program.constant_buffer += [Buffer(FileRange(zeros, 0, filler)), weight]
    tensor = program.execution_plan[0].values[1].val
    tensor.data_buffer_idx = 2  # type: ignore[union-attr]
    program.named_data.append(NamedData("behind", b"behind everything", 64))
    path = folder / "huge.pte"
    out = SparseFile(path)
    write_pte(program, out)  # type: ignore[arg-type]
    out.close()
    return path, program
