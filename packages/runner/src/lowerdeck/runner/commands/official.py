"""One method in the official runtime, where it is installed, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lowerdeck.inspect import CommandError, ExitStatus, official_binding_name

# A program and no function: the runtime ends its process at some files, and prints where it likes.
_PROGRAM = """
import sys, time
import torch
from lowerdeck.inspect import official_binding

given, found = sys.argv[1:]
what = torch.load(given, weights_only=True)
module = official_binding()["_load_for_executorch"](*what["files"])
module.run_method(what["method"], what["inputs"])
start = time.perf_counter()
for _ in range(what["repeat"]):
    outputs = module.run_method(what["method"], what["inputs"])
seconds = (time.perf_counter() - start) / what["repeat"]
outputs = [one.clone() if isinstance(one, torch.Tensor) else one for one in outputs]
torch.save({"outputs": outputs, "seconds": seconds}, found)
"""


@dataclass(frozen=True, slots=True)
class OfficialCall:
    """What calls in the official runtime gave.

    Attributes:
        outputs: The flat results of the last one.
        seconds: What one took; a first one, in which memory is planned, is not counted.
        runtime: Which runtime it was.
    """

    outputs: list[Any]
    seconds: float
    runtime: str


def call_officially(
    files: Sequence[Path], method: str, inputs: Sequence[Any], repeat: int
) -> OfficialCall:
    """Return what a method gives and takes in the official runtime.

    Args:
        files: The ``.pte`` file, and the ``.ptd`` file beside it where there is one.
        method: The method's name.
        inputs: Its flat inputs.
        repeat: The number of calls.

    Raises:
        lowerdeck.inspect.CommandError: The runtime is not installed, or refuses the file or
            the call, or ends with it.
    """
    if official_binding_name() is None:
        raise CommandError(
            "--no-emulation wants the official runtime, which is not installed: pip install "
            "executorch, or leave the option out and take times for those of an emulator",
            ExitStatus.FAILED,
        )
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder, "given.pt"), Path(folder, "found.pt")
        what = {
            "files": [str(file) for file in files],
            "method": method,
            "inputs": list(inputs),
            "repeat": repeat,
        }
        torch.save(what, given)
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(given), str(found)],
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode or not found.is_file():
            told = done.stderr.strip().splitlines()
            ended = f"its process ended with {done.returncode}"
            raise CommandError(
                f"the official runtime refuses {files[0]}: "
                f"{told[-1] if told and done.returncode > 0 else ended}",
                ExitStatus.FAILED,
            )
        answer = torch.load(found, weights_only=True)
    name = f"the official ExecuTorch runtime ({version('executorch')})"
    return OfficialCall(answer["outputs"], answer["seconds"], name)
