"""The elements of a tensor as bytes."""

from __future__ import annotations

import torch

from lowerdeck.torch_base import bytes_of


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
