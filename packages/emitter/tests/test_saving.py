"""A program and its external data on the disk: the old ones, the new ones, never a mix."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.emitter import EmitConfig, EmittedProgram, EmitterError, emit
from lowerdeck.serializer import ProgramError, open_model
from lowerdeck_zoo import Holding, Of, exported


def program(value: float = 1.0) -> ExportedProgram:
    model = nn.Linear(4, 4)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return exported(model, torch.ones(1, 4))


def emitted(value: float) -> EmittedProgram:
    config = EmitConfig(weights_file="weights", constant_methods={"mark": value})
    return emit(program(value), config=config)


@pytest.mark.parametrize("weights", [None, "weights"])
def test_save_writes_the_bytes_or_nothing(tmp_path: Path, weights: str | None) -> None:
    made, path = emit(program(), config=EmitConfig(weights_file=weights)), tmp_path / "model.pte"
    with pytest.raises(OSError, match="no such folder"):
        made.save(tmp_path / "no such folder" / "model.pte")
    path.mkdir()
    with pytest.raises(OSError, match="model"):
        made.save(path)
    assert [each.name for each in tmp_path.iterdir()] == ["model.pte"]
    path.rmdir()
    for options in ({}, {"segment_alignment": 4096}):
        size = made.save(path, **options)
        assert path.read_bytes() == made.to_bytes(**options)
        assert size == path.stat().st_size
    files = {file.stem: file.read_bytes() for file in tmp_path.glob("*.ptd")}
    assert files == made.external_files()
    for given in (3, None, io.StringIO()):
        with pytest.raises((ProgramError, TypeError), match=r"(?i)path"):
            made.save(given)  # type: ignore[arg-type]


class Parts(
    Holding,
    first=lambda: nn.Linear(4, 8),
    last=lambda: nn.Linear(8, 2),
    total=lambda: torch.zeros(2),
    scale=lambda: torch.full((2,), 2.0),
):
    """Two layers, and state that changes."""

    def forward(self, x: torch.Tensor) -> Any:
        y: torch.Tensor = self.last(self.first(x)) * self.get_buffer("scale")
        self.total.add_(y[0])
        return y + self.total


def by_layer(node: Node) -> str | None:
    assert node.op == "placeholder"
    if "weight" not in node.name:
        return None
    return "first" if node.meta["val"].shape[0] == 8 else "last"


def test_each_weight_goes_to_the_file_that_is_chosen_for_it(tmp_path: Path) -> None:
    parts = exported(Parts(), torch.ones(1, 4))
    asked: set[str] = set()

    def choose(node: Node) -> str | None:
        asked.add(node.name)
        return by_layer(node)

    made = emit(parts, config=EmitConfig(external_constants=choose))
    parameters = {"p_first_bias", "p_first_weight", "p_last_bias", "p_last_weight"}
    assert asked == parameters | {"b_scale"}
    made.save(tmp_path / "model.pte")
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["first.ptd", "last.ptd", "model.pte"]
    with open_model(tmp_path / "model.pte", [tmp_path / name for name in files[:2]]) as model:
        assert set(model.entries) == {"first.weight", "last.weight"}
    same = emit(parts, config=EmitConfig(external_constants=lambda node: "all"))
    plain = emit(parts, config=EmitConfig(weights_file="all"))
    assert same.to_bytes() == plain.to_bytes()
    assert same.external_files() == plain.external_files()
    none = emit(parts, config=EmitConfig(external_constants=lambda node: None))
    assert none.to_bytes() == emit(parts).to_bytes()


def test_no_values_of_weights_in_a_file_are_left_in_the_program() -> None:
    def of(value: float) -> torch.export.ExportedProgram:
        # Small enough to be folded.
        weight = torch.full((3,), value)
        return exported(Of(lambda self, x: x + self.weight.exp(), weight=weight), torch.ones(3))

    config = EmitConfig(weights_file="weights")
    one, two = (emit(of(value), config=config).to_bytes() for value in (1.0, 2.0))
    assert one == two
    assert emit(of(1.0)).to_bytes() != emit(of(2.0)).to_bytes()


def test_a_weight_of_several_methods_has_one_file() -> None:
    model = Parts()
    programs = {name: exported(model, torch.ones(1, 4)) for name in ("forward", "again")}
    made = emit(programs, config=EmitConfig(external_constants=by_layer))
    assert set(made.external_files()) == {"first", "last"}
    first = programs["again"].graph

    def differs(node: Node) -> str | None:
        return "one" if node.graph is first else "other"

    with pytest.raises(EmitterError, match="for the same weight in another method"):
        emit(programs, config=EmitConfig(external_constants=differs))


STEMS = ("", "../up", "a/b", "/abs", "x\0", ".", 3, Path("w"), b"w")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(({"weights_file": stem}, "as weights_file, expected the stem") for stem in STEMS),
        *(
            ({"external_constants": lambda _, stem=stem: stem}, "returned .* for 'weight'")
            for stem in (*STEMS, True)
        ),
        ({"weights_file": "w", "external_constants": by_layer}, "expected one of the two"),
        ({"external_constants": True}, "found True as external_constants"),
    ],
)
def test_a_name_that_no_file_has_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(EmitterError, match=message):
        emit(program(), config=EmitConfig(**config))
