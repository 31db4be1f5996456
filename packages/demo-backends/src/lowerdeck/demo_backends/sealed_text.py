"""Blobs of plain text under a line that names their format, its version and a checksum."""

from __future__ import annotations

import zlib

from lowerdeck.demo_backends.errors import BlobError


def seal(name: str, version: int, lines: list[str]) -> bytes:
    """Return the lines as a blob.

    Args:
        name: The backend's id.
        version: The version of its format.
        lines: What the blob says, in ASCII.

    Returns:
        ``NAME VERSION CRC32`` and the lines, each ended by a newline.
    """
    body = "".join(f"{line}\n" for line in lines).encode("ascii")
    return f"{name} {version} {zlib.crc32(body):08x}\n".encode("ascii") + body


def unseal(name: str, version: int, blob: bytes) -> list[str]:
    """Return the lines of a blob, once its name, version and checksum are right.

    Args:
        name: The backend's id.
        version: The version that the reader knows.
        blob: The bytes; nothing about them is trusted.

    Returns:
        The lines after the first.

    Raises:
        BlobError: The blob is another's, of another version, truncated or damaged.
    """
    first, newline, body = blob.partition(b"\n")
    words = first.split(b" ")
    if not newline or len(words) != 3 or words[0] != name.encode("ascii"):
        raise BlobError(
            f"a blob of {name} begins with that name, a version and a checksum; found "
            f"{first[:60]!r}"
        )
    if words[1] != str(version).encode("ascii"):
        raise BlobError(
            f"the blob is of version {words[1][:20]!r} and this runtime reads version {version}: "
            "lower the model again, or install the runtime of that version"
        )
    if words[2] != f"{zlib.crc32(body):08x}".encode("ascii"):
        raise BlobError(
            f"the blob's checksum is {zlib.crc32(body):08x}, its first line says "
            f"{words[2][:20]!r}: it was truncated or damaged"
        )
    try:
        lines = body.decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        raise BlobError(f"the blob is not plain text: {error}") from error
    if lines.pop() != "":
        raise BlobError("the blob does not end with a newline: it was truncated")
    return lines
