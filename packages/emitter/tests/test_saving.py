"""A program and its external data on the disk: the old ones, the new ones, never a mix."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.emitter import EmitConfig, EmittedProgram, EmitterError, emit
from lowerdeck.serializer import FileRange, ProgramError, open_model


def emitted(value: float) -> EmittedProgram:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    program = torch.export.export(model, (torch.ones(1, 4),))
    return emit(
        program, config=EmitConfig(weights_file="weights", constant_methods={"mark": value})
    )


def marks(folder: Path) -> tuple[object, float] | None:
    """Return what the program and its data were made with; None where there is no program."""
    path = folder / "model.pte"
    if not path.exists():
        return None
    with open_model(path, [folder / "weights.ptd"]) as model:
        weight = next(iter(model.entries.values())).data
        assert not isinstance(weight, FileRange)
        plan = next(p for p in model.program_file.program().execution_plan if p.name == "mark")
        constant = next(v.val for v in plan.values if v.val is not None)
        first: float = torch.frombuffer(bytearray(weight), dtype=torch.float32)[0].item()
    return getattr(constant, "double_val", None), first


def _stop_at(number: int, stop: Callable[[], object]) -> None:
    calls = [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                stop()
            return call(*args, **options)

        return run

    for name in ("open", "replace", "unlink", "fsync", "close"):
        setattr(os, name, counted(getattr(os, name)))


def test_a_killed_process_leaves_no_program_with_the_data_of_another(tmp_path: Path) -> None:
    old, new = emitted(1.0), emitted(2.0)
    found = []
    for step in range(1, 100):
        folder = tmp_path / str(step)
        folder.mkdir()
        old.save(folder / "model.pte")
        child = os.fork()
        if not child:
            _stop_at(step, lambda: os._exit(9))
            new.save(folder / "model.pte")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found.append(marks(folder))
        if not status:
            break
    assert found[0] == (1.0, 1.0)
    assert found[-1] == (2.0, 2.0)
    assert {*found} <= {None, (1.0, 1.0), (2.0, 2.0)}


def test_save_takes_the_layout_with_and_without_external_data(tmp_path: Path) -> None:
    for weights in (None, "weights"):
        program = torch.export.export(nn.Linear(4, 4), (torch.ones(1, 4),))
        made = emit(program, config=EmitConfig(weights_file=weights))
        path = tmp_path / "model.pte"
        size = made.save(path, segment_alignment=4096)
        assert path.read_bytes() == made.to_bytes(segment_alignment=4096)
        assert size == path.stat().st_size


@pytest.mark.parametrize("weights", [None, "weights"])
def test_save_leaves_nothing_where_it_cannot_write(tmp_path: Path, weights: str | None) -> None:
    program = torch.export.export(nn.Linear(4, 4), (torch.ones(1, 4),))
    made = emit(program, config=EmitConfig(weights_file=weights))
    with pytest.raises(OSError, match="no such folder"):
        made.save(tmp_path / "no such folder" / "model.pte")
    (tmp_path / "model.pte").mkdir()
    with pytest.raises(OSError, match="model"):
        made.save(tmp_path / "model.pte")
    assert [each.name for each in tmp_path.iterdir()] == ["model.pte"]


@pytest.mark.parametrize("weights", [None, "weights"])
@pytest.mark.parametrize("given", [3, None, b"model.pte", "a\0b", io.StringIO()], ids=repr)
def test_save_refuses_what_is_no_path(given: Any, weights: str | None) -> None:
    program = torch.export.export(nn.Linear(4, 4), (torch.ones(1, 4),))
    made = emit(program, config=EmitConfig(weights_file=weights))
    with pytest.raises(ProgramError, match=r"^found .*, expected"):
        made.save(given)


def test_external_data_need_a_file_beside_them(tmp_path: Path) -> None:
    before = sorted(Path("/dev").iterdir())
    with pytest.raises(ProgramError, match=r"/dev/null is a device .* 'weights': give the path"):
        emitted(1.0).save("/dev/null")
    with pytest.raises(ProgramError, match="found a BytesIO, expected a path"):
        emitted(1.0).save(io.BytesIO())  # type: ignore[arg-type]
    assert sorted(Path("/dev").iterdir()) == before


@pytest.mark.parametrize("stem", ["", "../up", "a/b", "/abs", "x\0", ".", 3, Path("w"), b"w"])
def test_a_name_that_no_file_has_is_refused_when_it_is_configured(stem: Any) -> None:
    program = torch.export.export(nn.Linear(4, 4), (torch.ones(1, 4),))
    with pytest.raises(EmitterError, match="as weights_file, expected the stem"):
        emit(program, config=EmitConfig(weights_file=stem))
