"""``lowerdeck extract FILE``: write delegates' blobs, constants and named data to files."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import struct
from pathlib import Path

from lowerdeck.inspect.commands.answers import (
    CommandError,
    ExitStatus,
    reading,
    say,
    size_text,
    writing,
)
from lowerdeck.inspect.commands.paths import check_paths
from lowerdeck.inspect.report.file_map import Stored, all_stored
from lowerdeck.inspect.report.values import dtype_name
from lowerdeck.serializer import ScalarType, Tensor, byte_view, open_pte

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 100
_FOLDERS = {"delegate": "delegates", "named": "named_data"}


class ExtractCommand:
    """Writes each blob of a program to a file, and a ``manifest.json`` that lists the files."""

    help = "write delegates and constants of a file to a folder"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command."""
        parser.add_argument("file", type=Path, metavar="FILE", help="a .pte file")
        parser.add_argument(
            "-o",
            "--output",
            type=Path,
            metavar="FOLDER",
            help="a new folder (by default NAME_parts beside NAME.pte)",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Write the files.

        Returns:
            0.

        Raises:
            CommandError: The folder already exists or cannot be written, or the file is malformed
                or cannot be opened.
        """
        check_paths(read=[("FILE", args.file)], written=[("--output", args.output)])
        target = args.output or args.file.with_name(f"{args.file.stem}_parts")
        with reading(args.file), open_pte(args.file) as file:
            parts = list(all_stored(file.program()))
        with writing(target):
            total = write_parts(parts, target)
        say(f"wrote {size_text(total)} to {target}; manifest.json there describes each file")
        return ExitStatus.DONE


def write_parts(parts: list[Stored], target: Path) -> int:
    """Write parts to a new folder, all or none, and return their total size in bytes.

    Args:
        target: The folder; it must not exist.

    Raises:
        CommandError: The output folder already exists.
        OSError: The folder cannot be written.
    """
    if target.exists() or target.is_symlink():
        raise CommandError(
            f"{target} already exists; give a new folder with --output", ExitStatus.USAGE
        )
    # Not by tempfile, whose folders ignore umask and are private to their owner.
    work = target.parent / f".{target.name[:200]}-{os.urandom(6).hex()}"
    work.mkdir()
    try:
        manifest, written = [], _Written()
        for number, part in enumerate(parts):
            manifest.append(_write(part, number, work, written))
        text = json.dumps(manifest, indent=2)
        (work / "manifest.json").write_text(text, encoding="utf-8")
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return sum(size for _, size in written.values())


# Written files by id of the bytes (one view per range of the file) and header: a small file may
# refer to the same bytes thousands of times.
_Written = dict[tuple[int, bytes | None], tuple[str, int]]


def _write(part: Stored, number: int, work: Path, written: _Written) -> dict[str, object]:
    header = npy_header(part.tensor) if part.tensor is not None else None
    key = id(part.storage), header
    if key not in written:
        written[key] = _write_file(part, number, work, header)
    path, size = written[key]
    entry: dict[str, object] = {"file": path, "name": part.label, "size": size}
    if part.tensor is not None:
        entry["dtype"] = dtype_name(part.tensor.scalar_type)
        entry["sizes"] = list(part.tensor.sizes)
        entry["dim_order"] = list(part.tensor.dim_order)
    return entry


def _write_file(part: Stored, number: int, work: Path, header: bytes | None) -> tuple[str, int]:
    # Names from the file are untrusted: keep the safe characters; the number makes names unique.
    safe = _UNSAFE.sub("_", part.label[:_LONGEST_NAME]).strip(".") or "unnamed"
    data = byte_view(part.storage, part.label)
    if header is not None and part.tensor is not None:
        data = data[: part.tensor.nbytes]
    folder = _FOLDERS.get(part.kind, part.kind)
    path = Path(folder) / f"{number:05d}-{safe}{'.npy' if header else '.bin'}"
    (work / folder).mkdir(exist_ok=True)
    with (work / path).open("wb") as out:
        out.write(header or b"")
        out.write(data)
    return path.as_posix(), data.nbytes


# NumPy Enhancement Proposal 1, "A Simple File Format for NumPy Arrays", version 1.0.
_DESCRIPTIONS = {
    ScalarType.BYTE: "|u1",
    ScalarType.CHAR: "|i1",
    ScalarType.SHORT: "<i2",
    ScalarType.INT: "<i4",
    ScalarType.LONG: "<i8",
    ScalarType.HALF: "<f2",
    ScalarType.FLOAT: "<f4",
    ScalarType.DOUBLE: "<f8",
    ScalarType.COMPLEX_FLOAT: "<c8",
    ScalarType.COMPLEX_DOUBLE: "<c16",
    ScalarType.BOOL: "|b1",
    ScalarType.UINT16: "<u2",
    ScalarType.UINT32: "<u4",
    ScalarType.UINT64: "<u8",
}
_MAGIC = b"\x93NUMPY\x01\x00"
_ALIGNMENT = 64


def npy_header(tensor: Tensor) -> bytes | None:
    """Return the ``.npy`` header for a tensor.

    Args:
        tensor: The tensor; its data follow the header unchanged.

    Returns:
        The header, or None if the format does not support the tensor: a type that NumPy lacks, or
        a layout that is not contiguous.
    """
    description = _DESCRIPTIONS.get(tensor.scalar_type)
    if description is None or list(tensor.dim_order) != list(range(len(tensor.sizes))):
        return None
    shape = f"({', '.join(map(str, tensor.sizes))}{',' if len(tensor.sizes) == 1 else ''})"
    text = f"{{'descr': '{description}', 'fortran_order': False, 'shape': {shape}, }}"
    used = len(_MAGIC) + 2 + len(text) + 1
    padded = text + " " * (-used % _ALIGNMENT) + "\n"
    return _MAGIC + struct.pack("<H", len(padded)) + padded.encode("ascii")


command: ExtractCommand = ExtractCommand()
