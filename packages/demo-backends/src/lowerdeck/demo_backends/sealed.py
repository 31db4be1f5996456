"""Blobs under a first line that names their format, its version and a checksum."""

from __future__ import annotations

import zlib

from lowerdeck.demo_backends.errors import BlobError


def seal(name: str, version: str, body: bytes) -> bytes:
    """Return ``NAME VERSION CRC32`` as a line, and the body.

    Args:
        version: The version of its format.
        body: What the blob says.
    """
    return f"{name} {version} {zlib.crc32(body):08x}\n".encode("ascii") + body


def unseal(name: str, version: str, blob: bytes) -> bytes:
    """Return the body of a blob, once its name, version and checksum are right.

    Args:
        version: The version that the reader knows.
        blob: The bytes; nothing about them is trusted.

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
    if words[1] != version.encode("ascii"):
        raise BlobError(
            f"the blob is of version {words[1][:80]!r} and this runtime reads version {version}: "
            "lower the model again, or install the runtime of that version"
        )
    checksum = f"{zlib.crc32(body):08x}".encode("ascii")
    if words[2] != checksum:
        raise BlobError(
            f"the blob's checksum is {checksum!r}, its first line says {words[2][:20]!r}: it was "
            "truncated or damaged"
        )
    return body
