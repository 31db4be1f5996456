"""Constants in whatever form a model holds them give eager's numbers in the official runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from lowerdeck.emitter import EmitConfig, UnsupportedError, emit
from lowerdeck_zoo import assert_close, exported, official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

MANY = 30


class Holder(nn.Module):
    """Adds each of its buffers to its input, which has their shape."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        for number, tensor in enumerate(tensors):
            self.register_buffer(f"c{number}", tensor)
        self.many = len(tensors)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x + getattr(self, f"c{number}") for number in range(self.many)]


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda b: b,
    "transposed": lambda b: b.t().contiguous().t(),
    "expanded": lambda b: b[:1].expand(4, 6),
    "strided": lambda b: b.repeat_interleave(3, 1)[:, ::3],
    "sliced": lambda b: torch.cat([b, b])[2:6],
    "negated": lambda b: torch.complex(b, b).conj().imag,
    "parameter": lambda b: nn.Parameter(b.t().contiguous().t()),
}


def check(model: nn.Module, x: torch.Tensor, folder: Path, **options: Any) -> None:
    """Compare the program with eager, loaded from bytes and from a path."""
    emitted = emit(exported(model, x), config=EmitConfig(**options))
    with torch.no_grad():
        expected = model(x)
    emitted.save(folder / "model.pte")
    data = [*folder.glob("*.ptd")]
    sources: list[tuple[Any, Any]] = [(folder / "model.pte", data[0] if data else None)]
    if not data:
        sources.append((emitted.to_bytes(), None))
    for source, weights in sources:
        outcome = official.run(source, [official.Call((x,))], data=weights)
        assert isinstance(outcome, official.Ran), outcome
        assert_close(outcome.outputs[0], expected, atol=0, rtol=0)


@pytest.mark.parametrize("weights", [None, "weights"])
@pytest.mark.parametrize("form", FORMS)
def test_many_small_constants_of_one_form(form: str, weights: str | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    # Every third has the content of another one: its copy is dropped, and its memory used again.
    content = [torch.randn(4, 6) for _ in range(MANY)]
    content = [content[0].clone() if not n % 3 else c for n, c in enumerate(content)]
    check(
        Holder([FORMS[form](c) for c in content]),
        torch.randn(4, 6),
        tmp_path,
        weights_file=weights,
    )


def test_many_small_constants_of_all_forms(tmp_path: Path) -> None:
    torch.manual_seed(1)
    forms = [*FORMS.values()]
    content = [torch.randn(4, 6) for _ in range(5)]
    tensors = [forms[n % len(forms)](content[n % 5]) for n in range(4 * MANY)]
    check(Holder(tensors), torch.randn(4, 6), tmp_path)


@pytest.mark.parametrize("images", [torch.contiguous_format, torch.channels_last])
def test_constants_that_are_images(images: torch.memory_format, tmp_path: Path) -> None:
    torch.manual_seed(2)
    content = [torch.randn(1, 3, 4, 5) for _ in range(7)]
    tensors = [
        content[n % 7].to(memory_format=[torch.contiguous_format, torch.channels_last][n % 2])
        for n in range(MANY)
    ]

    class Image(Holder):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            y = x.to(memory_format=images)
            return [(y * c).relu().sum((2, 3)) for c in self.buffers()]

    model, x = Image([t.round() for t in tensors]), torch.randn(1, 3, 4, 5).round()
    check(model, x, tmp_path)


class Named(torch.Tensor):
    """A subclass with memory of its own."""


def test_constants_of_a_subclass(tmp_path: Path) -> None:
    torch.manual_seed(3)
    tensors = [torch.randn(6, 4).t().as_subclass(Named) for _ in range(MANY)]
    plain = Holder([torch.Tensor(t.as_subclass(torch.Tensor)) for t in tensors])
    emitted = emit(exported(Holder(tensors), torch.ones(4, 6)))
    outcome = official.run(emitted.to_bytes(), [official.Call((torch.ones(4, 6),))])
    assert isinstance(outcome, official.Ran), outcome
    assert_close(outcome.outputs[0], plain(torch.ones(4, 6)), atol=0, rtol=0)


def test_a_subclass_that_holds_other_tensors_is_taken_apart_or_refused(tmp_path: Path) -> None:
    from_two = [TwoTensor(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(3)]
    with pytest.raises(UnsupportedError, match="TwoTensor"):
        emit(exported(Holder(from_two), torch.ones(4, 6)))
