"""A constant is known by its content or by memory that is held, never by an address alone."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from emitter_running import check, results  # type: ignore[import-not-found]

from lowerdeck.emitter import emit
from lowerdeck.emitter.frontend.constants import ConstantPool
from lowerdeck_zoo import Of, assert_close, exported


def stored(pool: ConstantPool, tensor: torch.Tensor, order: tuple[int, ...]) -> int:
    return pool.index_of(pool.bytes_of(tensor, order))


def content(pool: ConstantPool, index: int) -> bytes:
    return bytes(memoryview(pool.buffers[index].storage))  # type: ignore[arg-type]


def elements_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("elements", [6, 2000])
def test_memory_that_is_freed_and_used_again_is_another_constant(elements: int) -> None:
    pool = ConstantPool()
    wanted: list[tuple[int, bytes]] = []
    for turn in range(200):
        # Each tensor, and each copy of it in another layout, is gone after its turn.
        tensor = torch.full((elements, 2), float(turn % 7)).t()
        tensor[0, 0] = float(turn % 11)
        index = stored(pool, tensor, (0, 1))
        wanted.append((index, elements_of(tensor)))
        del tensor
        gc.collect(0)
    for index, expected in wanted:
        assert content(pool, index) == expected


@pytest.mark.parametrize("elements", [16, 4096])
def test_a_constant_laid_out_anew_is_stored_once(elements: int) -> None:
    pool = ConstantPool()
    weight = torch.randn(elements, 4)
    lazy = torch._lazy_clone(weight)
    one, two, three = (stored(pool, view, (0, 1)) for view in (weight.t(), weight.t(), lazy.t()))
    other = stored(pool, weight.t().neg(), (0, 1))
    assert one == two == three != other
    assert len(pool.buffers) == 3
    assert torch._C._is_cow_tensor(lazy)  # type: ignore[attr-defined]


def kinds() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 10)
    pair = torch.randn(6, 10, dtype=torch.complex64)
    image = torch.randn(2, 3, 4, 4)
    return {
        "plain": base,
        "transposed": base.t(),
        "expanded": torch.randn(1, 10).expand(6, 10),
        "strided": base[::2, 1::3],
        "part": base[2:4],
        "conjugated": pair.conj(),
        "negated": pair.conj().imag,
        "channels last": image.to(memory_format=torch.channels_last),
        "overlapping": torch.randn(20).as_strided((6, 5), (2, 1)),
        "empty": torch.zeros(0, 3).t(),
        "one number": torch.tensor(3.0),
    }


@pytest.mark.parametrize("name", kinds())
def test_the_bytes_are_those_of_the_elements_in_order(name: str) -> None:
    tensor, pool = kinds()[name], ConstantPool()
    for order in (tuple(range(tensor.dim())), tuple(reversed(range(tensor.dim())))):
        laid = tensor.resolve_conj().resolve_neg().permute(order).contiguous()
        assert bytes(pool.bytes_of(tensor, order)) == elements_of(laid)


class Named(torch.Tensor):
    """A subclass with memory of its own."""


def test_constants_of_a_subclass_are_those_of_its_elements() -> None:
    holder, plain = torch.nn.Module(), torch.randn(6, 4).t()
    holder.register_buffer("kept", plain.as_subclass(Named))
    model = Of(lambda self, x: x + self.holder.kept, holder=holder)
    found = results(emit(exported(model, torch.ones(4, 6))), [("forward", [torch.ones(4, 6)])])
    assert_close(found[0], plain + 1)


def test_equal_calls_on_large_constants_are_one_where_it_has_run() -> None:
    # The result of 2 kB is not folded, as it would make the file larger.
    large = torch.rand(512)

    def after_a_branch(self: Any, x: torch.Tensor) -> Any:
        def grow(x: torch.Tensor) -> Any:
            return x + self.large.exp()

        return torch.cond(x.sum() > 0, grow, torch.sin, (x,)) * self.large.exp()

    def as_result_of_a_branch(self: Any, x: torch.Tensor) -> Any:
        before = x + self.large.exp()
        return before * torch.cond(x.sum() > 0, lambda x: self.large.exp(), torch.sin, (x,))

    for function in (after_a_branch, as_result_of_a_branch):
        calls = ((torch.ones(512),), (-torch.ones(512),))
        check(Of(function, large=large), *calls)


def test_equal_calls_are_written_back_to_several_buffers() -> None:
    def fill(self: Any, x: torch.Tensor) -> Any:
        before = self.one + self.two
        self.one.copy_(self.large.exp())
        self.two.copy_(self.large.exp())
        return before + x

    state = {name: torch.zeros(512) for name in ("one", "two")}
    check(Of(fill, large=torch.rand(512), **state), *[(torch.ones(512),)] * 2)
