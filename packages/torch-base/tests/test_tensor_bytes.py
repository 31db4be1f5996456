"""A tensor as its bytes, and bytes as a tensor."""

from __future__ import annotations

import pytest
import torch

from lowerdeck.torch_base import bytes_of, view_tensor


def test_elements_come_in_row_major_order() -> None:
    tensor = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    assert bytes(bytes_of(tensor)) == bytes(range(6))
    assert bytes(bytes_of(tensor.t())) == bytes([0, 3, 1, 4, 2, 5])
    assert bytes(bytes_of(torch.empty(0))) == b""
    assert {bytes(range(6)): "found"}[bytes_of(tensor)] == "found"  # type: ignore[index]


def test_bytes_and_tensors_are_views_of_each_other() -> None:
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    data = bytes_of(tensor)
    assert data.readonly
    assert torch.equal(view_tensor(data, torch.int32, (2, 3)), tensor)
    tensor[0, 0] = 7
    del tensor
    assert view_tensor(data, torch.int32, (6,))[0] == 7


def test_other_numbers_of_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of shape \[2, 3\] has 24 bytes, found 23"):
        view_tensor(bytes(23), torch.float32, (2, 3))
