"""Tensors in files that leave nothing behind."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lowerdeck.torch_base import tensor_in_file

POSIX = pytest.mark.skipif(os.name != "posix", reason="mapped files keep their names")


@POSIX
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_elements_lie_in_order_in_no_file_that_has_a_name(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    wanted = (torch.randn(3, 1000) * 10).to(dtype)
    found = tensor_in_file(iter(wanted), wanted.numel(), dtype)
    assert found is not None
    assert found.dtype == dtype
    assert torch.equal(found, wanted.reshape(-1))
    assert not list(tmp_path.iterdir())
    found.fill_(0)  # it is the holder's own


@POSIX
def test_pieces_are_made_one_after_the_other() -> None:
    alive = 0
    most = 0

    def pieces() -> Iterator[torch.Tensor]:
        nonlocal alive, most
        for _ in range(4):
            alive += 1
            most = max(most, alive)
            yield torch.ones(10)
            alive -= 1

    assert tensor_in_file(pieces(), 40, torch.float32) is not None
    assert most == 1


@POSIX
def test_a_folder_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.warns(
        RuntimeWarning, match=r"nowhere cannot store .*No such file.*TMPDIR"
    ) as told:
        assert tensor_in_file([torch.ones(2)], 2, torch.float32) is None
    # So that Python shows it once for each caller.
    assert told[0].filename == __file__


@POSIX
def test_a_full_disk_and_what_a_piece_raises_are_told_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pieces(error: Exception) -> Iterator[torch.Tensor]:
        yield torch.ones(1 << 16)
        raise error

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.warns(RuntimeWarning, match="No space left on device.*they take memory instead"):
        assert tensor_in_file(pieces(full), 1 << 17, torch.float32) is None
    with pytest.raises(ValueError, match="no more"):
        tensor_in_file(pieces(ValueError("no more")), 1 << 17, torch.float32)
    assert not list(tmp_path.iterdir())
