"""Signatures that ``export_preserving`` records where torch's export fails, or renames a call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten


class WritesBeforeRegion(nn.Module):
    """With its signature torch's export ends in a program that its own verifier refuses."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.last = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.lerp_(x.detach(), 0.5)
        with torch.no_grad():
            y = x.sigmoid()
        result: Tensor = self.last(x * y)
        return result


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), WritesBeforeRegion()
        self.third = self.first

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.third(self.second(self.first(x)))
        return result


@pytest.mark.parametrize("strict", [False, True])
def test_a_signature_with_which_torchs_export_fails_is_left_out(strict: bool) -> None:
    eager, x = Around(), torch.randn(2, 3)[0]
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        torch.export.export(
            copy.deepcopy(eager), (x,), preserve_module_call_signature=("second",), strict=strict
        )
    made: Any = unflatten(export_preserving(copy.deepcopy(eager), (x,), strict=strict))
    rows = {row.path: row for row in made.swappable()}
    # And those whose results it writes: torch loses who reads the mark of a signature there.
    assert [path for path, row in rows.items() if row.replaceable] == ["first.0", "second.last"]
    assert "signature with which torch.export fails (RuntimeError)" in rows["second"].reason
    made.second.last = nn.ReLU()
    eager.second.last = nn.ReLU()  # type: ignore[assignment]
    torch.testing.assert_close(made(x), eager(x))
    made.second = nn.Identity()
    with pytest.raises(UnflattenError, match=r"torch\.export fails"):
        made(x)


class Nested(nn.Module):
    """One layer under several names, one of them in a module of several names itself."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(4, 4)
        self.a = nn.Sequential(layer, nn.ReLU())
        self.b = nn.ModuleDict({"x": layer, "y": self.a})

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b["y"](self.b["x"](self.a(x)))
        return result


@pytest.mark.parametrize("strict", [False, True])
def test_nested_shared_modules_keep_their_signatures(strict: bool) -> None:
    eager, x = Nested(), torch.randn(3, 4)
    program = export_preserving(eager, (x,), strict=strict)
    made = unflatten(program)
    assert all(row.replaceable and row.callable_alone is row.called for row in made.swappable())
    for path in ("a", "a.0", "a.1", "b.x", "b.y", "b.y.0"):
        torch.testing.assert_close(made.get_submodule(path)(x), eager.get_submodule(path)(x))
    for row in made.swappable():
        made = unflatten(program)
        made.set_submodule(row.path, eager.get_submodule(row.path))
        torch.testing.assert_close(made(x), eager(x))
