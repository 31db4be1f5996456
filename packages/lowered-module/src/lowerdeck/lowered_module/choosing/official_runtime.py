"""The bridge to the official runtime: files run in processes of their own.

``main`` is the only function of the package that loads ``executorch``, which must be installed for
it. It runs in a process of its own alone: the runtime ends its process at some files.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lowerdeck.lowered_module.errors import LoweringError

_A_SAMPLE = 0.02
"""Seconds that a sample takes at least: several calls of a small model."""
_LONG = 60.0
"""Seconds after which no round begins, when there were some."""
_FEW = 3
_PATIENCE = 600.0
_PROGRAM = f"from {__name__} import main; main()"
_PACKAGE = "executorch.extension.pybindings"


def runtime_backends() -> list[str]:
    """Return the names of the backends that the installed runtime has.

    Raises:
        LoweringError: It is not installed.
    """
    return list(_asked({"do": "backends"}))


def first_outputs(file: Path, inputs: Sequence[Any]) -> tuple[list[Any], float]:
    """Return what the first call of ``forward`` gives, and the seconds of the second.

    Args:
        file: The program.
        inputs: Flat inputs, as the program numbers them.

    Raises:
        LoweringError: The runtime refuses the file or the call, or ends with it.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder, "inputs.pt"), Path(folder, "outputs.pt")
        torch.save(list(inputs), given)
        what = {"do": "call", "files": [str(file)], "inputs": str(given), "outputs": str(found)}
        seconds = float(_asked(what))
        return torch.load(found, weights_only=True), seconds


def seconds_in_turn(
    files: Sequence[Path], inputs: Sequence[Any], rounds: int
) -> list[list[float]]:
    """Return the seconds of a call of each file, one figure for each round.

    In a round every file has its turn, so that a slow moment of the machine falls on all.

    Args:
        files: The programs.
        inputs: Flat inputs of ``forward``.
        rounds: How many; fewer where they take more than a minute.

    Raises:
        LoweringError: The runtime ends with one of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "inputs.pt")
        torch.save(list(inputs), given)
        names = [str(file) for file in files]
        found: list[list[float]] = _asked(
            {"do": "time", "files": names, "inputs": str(given), "rounds": rounds}
        )
        return found


def _asked(what: dict[str, Any]) -> Any:
    """Return what this module says as a program of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, json.dumps(what)],
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired as error:
        raise LoweringError(f"the runtime said nothing for {_PATIENCE:.0f} s") from error
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        told = done.stderr.strip().splitlines()
        ended = f"it ended with {done.returncode}" if done.returncode < 0 or not told else told[-1]
        raise LoweringError(f"the official runtime failed: {ended}")
    return json.loads(lines[-1])


def main() -> None:
    """Do what the command line says, in JSON; the last line of the output is the answer."""
    what: dict[str, Any] = json.loads(sys.argv[1])
    # The runtime prints where it likes; answers go where nothing else does.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    binding = _binding()
    if what["do"] == "backends":
        print(json.dumps(list(binding["_get_registered_backend_names"]())), file=answers)
        return
    inputs = torch.load(what["inputs"], weights_only=True)
    calls = [_call(binding, file, inputs) for file in what["files"]]
    if what["do"] == "call":
        torch.save([_owned(one) for one in calls[0]()], what["outputs"])
        print(_seconds(calls[0], 1), file=answers)
        return
    repeats = [_repeats(call) for call in calls]
    rounds: list[list[float]] = []
    start = time.perf_counter()
    while len(rounds) < what["rounds"] and (
        len(rounds) < _FEW or time.perf_counter() - start < _LONG
    ):
        rounds.append([_seconds(call, count) for call, count in zip(calls, repeats, strict=True)])
    print(json.dumps([list(each) for each in zip(*rounds, strict=True)]), file=answers)


def _binding() -> dict[str, Any]:
    """Return what the runtime's binding offers; its names are private, and all that there is."""
    try:
        # The door for users: it tells the runtime where OpenVINO's library lies.
        return vars(importlib.import_module(f"{_PACKAGE}.portable_lib"))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(f"{_PACKAGE}."):
            return vars(importlib.import_module(f"{_PACKAGE}._C"))  # its name from 1.5 on
        sys.exit("executorch is not installed: pip install executorch")


def _call(
    binding: dict[str, Any], file: str, inputs: Sequence[Any]
) -> Callable[[], Sequence[Any]]:
    module = binding["_load_for_executorch"](file)
    return lambda: module.forward(inputs)


def _owned(value: Any) -> Any:
    # What a call returns lies in the runtime's memory.
    return value.clone() if isinstance(value, torch.Tensor) else value


def _repeats(call: Callable[[], object]) -> int:
    """Return how many calls make a sample; the first ones, which plan memory, are not counted."""
    for _ in range(3):
        call()
    return max(1, round(_A_SAMPLE / max(_seconds(call, 1), 1e-7)))


def _seconds(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count
