"""What a ``DecompositionCache`` hands on, and under which settings of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from program_likeness import differences  # type: ignore[import-not-found]
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode

from lowerdeck.decompose import DecompositionCache, decompose, explain

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

GELU: Any = torch.ops.aten.gelu.default


class Making(nn.Module):
    """Makes tensors of the default dtype, on the default device, filled or not."""

    def forward(self, x: torch.Tensor, whole: torch.Tensor) -> Any:
        made = torch.linspace(0, 1, 4), torch.hann_window(5), torch.eye(3), torch.empty(4)
        attended = nn.functional.scaled_dot_product_attention(x, x, x)
        return (
            *made,
            attended,
            whole / 3,
            torch.special.i0(whole),
            nn.functional.linear(x, x[0, 0]),
        )


def _exported() -> torch.export.ExportedProgram:
    return torch.export.export(Making(), (torch.ones(1, 2, 4, 4), torch.arange(4)))


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _deterministic(mode: str) -> Iterator[None]:
    torch.set_deterministic_debug_mode(mode)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


@contextmanager
def _unfilled() -> Iterator[None]:
    with _deterministic("error"):
        settings: Any = deterministic
        settings.fill_uninitialized_memory = False
        try:
            yield
        finally:
            settings.fill_uninitialized_memory = True


@contextmanager
def _precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class WatchingCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


SETTINGS: dict[str, Any] = {
    "default dtype": _default_dtype,
    "default device": lambda: torch.device("meta"),
    "deterministic": lambda: _deterministic("error"),
    "deterministic, unfilled": _unfilled,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "precision": _precision,
    "function mode": Watching,
    "dispatch mode": WatchingCalls,
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_what_was_traced_under_other_settings_is_not_handed_on(setting: Any) -> None:
    program, cache = _exported(), DecompositionCache()
    decompose(program, cache=cache)
    mode = setting()
    with mode:
        alone, kept = decompose(program), decompose(program, cache=cache)
        assert not differences(kept, alone)
    held = len(cache)
    with mode if isinstance(mode, TorchFunctionMode | TorchDispatchMode) else setting():
        again = explain(program, cache=cache)
    # The same setting finds what it had, and so does the first.
    assert (again.traces, len(cache)) == (0, held)
    assert explain(program, cache=cache).traces == 0
    assert len(cache) == held


def test_templates_of_other_tables_are_bounded() -> None:
    program = torch.export.export(nn.GELU(), (torch.ones(2),))
    cache = DecompositionCache(size=8)
    for _ in range(20):
        decompose(program, {GELU: lambda x, approximate="none": x * 2}, cache=cache)
    assert len(cache) == 8
