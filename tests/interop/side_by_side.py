"""The tasks of the page on moving from exir: as exir does them, with one import changed, and ours.

A section of the page that has a block fenced as ``py`` is a task: that block is exir's side, the
``python`` block after it ours. What stands before the first task is run first. Each side has a
process of its own, so that ours never sees ExecuTorch.

    python tests/interop/side_by_side.py    # the table of times, for the page
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/how-to/move-from-exir.md"
EXIR, COMPAT, OURS = SIDES = ("executorch.exir", "exir_compat", "Lowerdeck")
_FENCE = re.compile(r"^```(python|py)\n(.*?)^```$", re.M | re.S)
_IMPORT = "from executorch.exir import "


@dataclass(frozen=True, slots=True)
class Task:
    """What a section of the page teaches.

    Attributes:
        name: Its heading.
        code: The block of each side.
    """

    name: str
    code: dict[str, str]


@dataclass(frozen=True, slots=True)
class Done:
    """What a side made of a task.

    Attributes:
        seconds: How long its second run computed, imports apart.
        folder: Where its files are.
        outputs: What it says that the model gives, None where it says nothing.
    """

    seconds: float
    folder: Path
    outputs: Any = field(repr=False)


def tasks(page: str) -> tuple[str, list[Task]]:
    """Return what is run before the tasks of the page, and the tasks.

    Args:
        page: The text of the page.
    """
    before, *sections = re.split(r"^##+ (?=.)", page, flags=re.M)
    shared, found = "", []
    for section in (before, *sections):
        blocks = _FENCE.findall(section)
        if any(kind == "py" for kind, _ in blocks):
            (_, exir), (_, ours) = blocks
            compat = exir.replace(_IMPORT, "from lowerdeck.exir_compat import ")
            code = {EXIR: exir, COMPAT: compat, OURS: ours}
            found.append(Task(section.partition("\n")[0], code))
        elif not found:
            shared += "".join(code for _, code in blocks)
    return shared, found


def done(side: str, folder: Path, page: str) -> dict[str, Done]:
    """Return what a side makes of each task.

    Args:
        side: One of ``SIDES``.
        folder: An empty folder for its files.
        page: The text of the page.
    """
    folder.mkdir(parents=True)
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), side, str(folder)],
        input=page,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    if ran.returncode:
        raise AssertionError(f"{side} failed:\n{ran.stdout[-1000:]}\n{ran.stderr[-4000:]}")
    found = {}
    for name, seconds in json.loads((folder / "seconds.json").read_text()).items():
        outputs = torch.load(folder / name / "outputs") if seconds["outputs"] else None
        found[name] = Done(seconds["second"], folder / name, outputs)
    return found


def table(found: dict[str, dict[str, Done]]) -> str:
    """Return the rows of the page's table of times.

    Args:
        found: What each side made of each task.
    """
    rows = [
        " | ".join(("", name, *(f"{found[side][name].seconds:.2f}" for side in SIDES), "")).strip()
        for name in found[OURS]
    ]
    return "\n".join(rows)


def _work(side: str, folder: Path) -> None:
    """Do all tasks of a page, twice each, and write how long the second time took."""
    warnings.simplefilter("ignore")
    shared, wanted = tasks(sys.stdin.read())
    common: dict[str, Any] = {}
    exec(shared, common)
    seconds = {}
    for task in wanted:
        (folder / task.name).mkdir()
        os.chdir(folder / task.name)
        imports, rest = _parted(task.code[side], task.name)
        names = dict(common)
        exec(imports, names)
        for _ in range(2):
            start = _processor_time()
            exec(rest, names)
            took = _processor_time() - start
        if "outputs" in names:
            torch.save(names["outputs"], "outputs")
        seconds[task.name] = {"second": took, "outputs": "outputs" in names}
    torch.save((common["inputs"], common["model"](*common["inputs"])), folder / "eager")
    if side == OURS and any(name.partition(".")[0] == "executorch" for name in sys.modules):
        raise SystemExit("our side imported ExecuTorch")
    (folder / "seconds.json").write_text(json.dumps(seconds))


def _processor_time() -> float:
    """Return the seconds that this process and what it started have computed.

    Unlike wall time they are the same however much else the machine does.
    """
    told = os.times()
    return told.user + told.system + told.children_user + told.children_system


def _parted(code: str, name: str) -> tuple[Any, Any]:
    """Return the imports of a block and what is left of it, compiled."""
    body = ast.parse(code).body
    kinds = (ast.Import, ast.ImportFrom)
    parts = (
        [n for n in body if isinstance(n, kinds)],
        [n for n in body if not isinstance(n, kinds)],
    )
    return tuple(compile(ast.Module(part, []), name, "exec") for part in parts)  # type: ignore[return-value]


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _work(sys.argv[1], Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as made:
            text = PAGE.read_text()
            print(table({side: done(side, Path(made) / side, text) for side in SIDES}))
