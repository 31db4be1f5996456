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


def test_the_view_is_of_the_tensors_own_memory_and_keeps_it() -> None:
    tensor = torch.zeros(1000, dtype=torch.uint8)
    view = bytes_of(tensor)
    tensor[3] = 7
    del tensor
    assert view[3] == 7
    assert view.readonly


def test_the_view_can_be_hashed_as_bytes_can() -> None:
    view = bytes_of(torch.arange(4, dtype=torch.uint8))
    assert {bytes(range(4)): "found"}[view] == "found"  # type: ignore[index]


def test_bytes_and_tensors_are_views_of_each_other() -> None:
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    data = bytes_of(tensor)
    assert torch.equal(view_tensor(data, torch.int32, (2, 3)), tensor)
    tensor[0, 0] = 7
    assert view_tensor(data, torch.int32, (6,))[0] == 7
    assert torch.equal(
        view_tensor(bytes_of(tensor.t()), torch.int32, (3, 2)), tensor.t().contiguous()
    )
    assert len(bytes_of(torch.empty(0))) == 0


def test_the_view_keeps_the_memory_alive() -> None:
    data = bytes_of(torch.full((1000,), 3.0))
    for _ in range(10):
        torch.zeros(1000)
    assert view_tensor(data, torch.float32, (1000,)).sum() == 3000


def test_other_numbers_of_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of shape \[2, 3\] has 24 bytes, found 23"):
        view_tensor(bytes(23), torch.float32, (2, 3))
