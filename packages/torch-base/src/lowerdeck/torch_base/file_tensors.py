"""Tensors in files without a name: memory that the system may take back at any time."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch

from lowerdeck.torch_base.tensor_bytes import bytes_of

_POSIX = os.name == "posix"
"""Whether a file can lose its name while it is mapped."""


def tensor_in_file(
    pieces: Iterable[torch.Tensor], count: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return a tensor that is stored in a mapped file.

    The file is in the system's folder for temporary ones (``TMPDIR``) and already unlinked: the
    system frees it after its last use, also if the process is killed.

    Args:
        pieces: The elements, some after the other, each piece of the dtype ``dtype``. They are
            written as they come, so that one of them at a time is in memory.
        count: How many elements there are together, at least one.

    Returns:
        ``dtype[count]``, or None where such a file cannot be written: the disk is full, or the
        system keeps files that are mapped from being deleted.

    Warns:
        RuntimeWarning: It cannot be written, so that the caller takes memory; the same words each
            time, as what cannot be written once will not be the next time.

    Example:
        >>> halves = (torch.full([2], float(number)) for number in range(2))
        >>> tensor_in_file(halves, 4, torch.float32)
        tensor([0., 0., 1., 1.])
    """
    if not _POSIX:
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
            f"{tempfile.tempdir or 'the folder of temporary files'} has no room for tensors that "
            f"are made on the way ({error.strerror or error}): they take memory instead; name a "
            "folder that has in TMPDIR",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    finally:
        if path:
            Path(path).unlink()
