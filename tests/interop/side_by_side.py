"""The tasks of the page on moving from exir: as exir does them, with one import changed, and ours.

A section of the page that has a block fenced as ``py`` is a task: that block is exir's side, the
``python`` block after it ours. What stands before the first task is run first. Each side has a
process of its own, so that ours never sees ExecuTorch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/how-to/move-from-exir.md"
EXIR, COMPAT, OURS = SIDES = ("executorch.exir", "exir_compat", "Lowerdeck")
_FENCE = re.compile(r"^```(python|py)\n(.*?)^```$", re.M | re.S)


def tasks(page: str) -> tuple[str, dict[str, dict[str, str]]]:
    """Return what is run before the tasks of the page, and the code of each side by task."""
    before, *sections = re.split(r"^##+ (?=.)", page, flags=re.M)
    shared, found = "", {}
    for section in (before, *sections):
        blocks = _FENCE.findall(section)
        if any(kind == "py" for kind, _ in blocks):
            (_, exir), (_, ours) = blocks
            compat = exir.replace(
                "from executorch.exir import ", "from lowerdeck.exir_compat import "
            )
            found[section.partition("\n")[0]] = {EXIR: exir, COMPAT: compat, OURS: ours}
        elif not found:
            shared += "".join(code for _, code in blocks)
    return shared, found


def done(side: str, folder: Path) -> dict[str, Any]:
    """Do all tasks as a side does them: files in folders by task, and outputs by task."""
    folder.mkdir(parents=True)
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), side, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    if ran.returncode:
        raise AssertionError(f"{side} failed:\n{ran.stdout[-1000:]}\n{ran.stderr[-4000:]}")
    return {"folder": folder, **torch.load(folder / "found")}


def _work(side: str, folder: Path) -> None:
    """Do all tasks of the page."""
    warnings.simplefilter("ignore")
    shared, wanted = tasks(PAGE.read_text())
    common: dict[str, Any] = {}
    exec(shared, common)
    found: dict[str, Any] = {"outputs": {}}
    for name, code in wanted.items():
        (folder / name).mkdir()
        os.chdir(folder / name)
        names = dict(common)
        exec(code[side], names)
        found["outputs"][name] = names.get("outputs")
    found |= {"inputs": common["inputs"], "eager": common["model"](*common["inputs"])}
    torch.save(found, folder / "found")
    if side == OURS and any(name.partition(".")[0] == "executorch" for name in sys.modules):
        raise SystemExit("our side imported ExecuTorch")


if __name__ == "__main__":
    _work(sys.argv[1], Path(sys.argv[2]))
