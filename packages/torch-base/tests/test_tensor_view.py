"""A tensor as a view on bytes."""

from __future__ import annotations

import pytest
import torch

from lowerdeck.torch_base import bytes_of, view_tensor


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
