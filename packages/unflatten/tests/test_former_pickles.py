"""Modules that a released version pickled are loaded by this one, run and may be changed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from lowerdeck.unflatten import export_preserving, unflatten

FOLDER = Path(__file__).parent / "former_pickles"
SIZES = ({0: Dim.AUTO, 1: Dim.AUTO},)


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, t: float) -> Any:
        return {"y": self.linear(x) * t / x.shape[1], "none": None}


class Model(nn.Module):
    """Has forms, constants, sizes and a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.step = Step()
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        for t in (0.5, 0.25):
            x = self.step(x, t)["y"]
        return self.head(x)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) / (x.shape[1] // 2)


class Doubles(nn.Module):
    """Gives what it calls an argument of which twice a size is known."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.halves = Halves()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.halves(torch.cat([x, x], 1)))


MODELS: dict[str, type[nn.Module]] = {"divided": Doubles}


def write(version: str) -> None:
    """Write the files of a version, which is the one that is installed."""
    x = torch.randn(3, 4, 2)
    programs = {
        "fixed": export_preserving(Model(), (x,)),
        "varying": export_preserving(Model(), (x,), dynamic_shapes=SIZES),
        "plain": torch.export.export(Model(), (x,)),
        "divided": export_preserving(Doubles(), (x,), dynamic_shapes=SIZES),
    }
    for name, program in programs.items():
        (FOLDER / f"{version}_{name}.pickle").write_bytes(pickle.dumps(unflatten(program)))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.pickle")), ids=lambda path: path.stem)
def test_what_a_former_version_pickled(path: Path) -> None:
    module: Any = pickle.loads(path.read_bytes())
    eager: Any = MODELS.get(path.stem.partition("_")[2], Model)()
    x = torch.randn(3, 4, 2)
    eager.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x), eager(x))
    for model in (module, eager):
        model.head.register_forward_hook(lambda _, args, result: result * 2)
    torch.testing.assert_close(module(x), eager(x))
    module.head = eager.head = nn.Linear(2, 2)
    torch.testing.assert_close(module(x), eager(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(module))(x), eager(x))


def test_there_are_some() -> None:
    assert len(list(FOLDER.glob("0.2.4_*.pickle"))) == 3
    assert len(list(FOLDER.glob("0.2.5_*.pickle"))) == 4
