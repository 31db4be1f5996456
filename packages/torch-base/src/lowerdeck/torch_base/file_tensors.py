"""Tensors in unlinked mapped files, whose pages the system can evict."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch

from lowerdeck.torch_base.tensor_bytes import bytes_of

_CAN_UNLINK_MAPPED = os.name == "posix"
"""Whether mapped files can be unlinked."""


def tensor_in_file(
    pieces: Iterable[torch.Tensor], count: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return a tensor in a memory-mapped temporary file.

    The file (in ``TMPDIR``) is unlinked, so the system frees it after its last use.

    Args:
        pieces: Consecutive elements, of dtype ``dtype``; each piece is written before the next one
            is requested.
        count: Total number of elements, at least one.

    Returns:
        ``dtype[count]``, or None if the file cannot be written or the system cannot unlink mapped
        files.

    Warns:
        RuntimeWarning: The file cannot be written.

    Example:
        >>> halves = (torch.full([2], float(number)) for number in range(2))
        >>> tensor_in_file(halves, 4, torch.float32)
        tensor([0., 0., 1., 1.])
    """
    if not _CAN_UNLINK_MAPPED:
        return None
    path = ""
    try:
        number, path = tempfile.mkstemp(prefix="lowerdeck-")
        with os.fdopen(number, "wb") as file:
            for piece in pieces:
                file.write(bytes_of(piece))
        return torch.from_file(path, shared=False, size=count, dtype=dtype)
    except OSError as error:
        warnings.warn(
            f"{tempfile.tempdir or 'the temporary folder'} cannot store intermediate tensors "
            f"({error.strerror or error}): they take memory instead; set TMPDIR to a writable "
            "folder with free space",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    finally:
        if path:
            Path(path).unlink()
