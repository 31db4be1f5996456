"""Run XNNPACK's files of every mode on ARM, real or emulated, and compare them with results here.

The runtime has other kernels there: integers are packed otherwise, float16 is computed in itself.
``ARM_PYTHON`` is the command of a Python there that has torch and executorch of the versions here.
Emulated, by Debian's ``qemu-user-static`` and an unpacked ``python3.11`` of arm64 in ``ROOT``,
with the wheels for aarch64 in ``SITE`` and their libraries' folders in ``LIBS``::

    env PYTHONPATH=SITE qemu-aarch64-static -cpu neoverse-n1 -L ROOT -E LD_LIBRARY_PATH=LIBS \
        ROOT/usr/bin/python3.11

Wheels: ``pip install --target SITE --no-deps --only-binary=:all: --python-version 3.11``, with
``--platform manylinux_2_N_aarch64`` for each N from 17 to 35, of torch, executorch and numpy of
the versions here, and, as torch's wheel there links CUDA, of the ``nvidia`` packages that it
names (one ``--target`` each, merged, since pip fills no folder that exists). Python: ``apt-get
download`` with ``-o APT::Architecture=arm64`` and separate lists, unpacked by ``dpkg -x``.
All 35 cases are right (executorch 1.4.1, torch 2.13.0, emulated), float16 a little further off,
as it is computed there.

An emulator shows the machine's own ``/proc/cpuinfo``, which ends the runtime while it is loaded:
``ROOT/proc/cpuinfo``, and ``possible`` and ``present`` in ``ROOT/sys/devices/system/cpu``, must be
those of the processor that is emulated.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.xnnpack_files import MODES, ROOT, stem

RUNNER = Path(__file__).with_name("run_files.py")
CASES = (
    *(f"{model}:{mode}" for model in ("cnn", "mlp", "decoder", "mobilenet") for mode in MODES),
    *(f"{model}:raw" for model in ("cnn", "decoder", "mobilenet")),
    *("own/unet_bilinear:raw", "own/wavenet:raw", "own/encoder:raw", "own/c3d:raw"),
)
_MORE = {"fp16": 4e-3}
"""How much further from torch's a result may be there: ARM computes in float16 as well."""
_ELSE = 1e-3
"""The same of the other modes: sums are in another order."""


def main(words: list[str]) -> None:
    """Make the files, run them here and there, and print both errors.

    Args:
        words: Cases such as ``cnn:static``; all where there are none.
    """
    there = shlex.split(os.environ.get("ARM_PYTHON", ""))
    if not there:
        sys.exit("set ARM_PYTHON to the command of a Python on ARM; see tests/arm/run.py")
    stems = []
    for case in words or CASES:
        model, form = case.split(":")
        for step in ("export", "ours"):
            command = [sys.executable, "-m", "benchmarks.xnnpack_files", step, model, form]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        stems.append(str(stem(model, form)))
    here, far = (_errors(python, stems) for python in ([sys.executable], there))
    wrong = 0
    for name in stems:
        bad = not far[name] <= here[name] + _MORE.get(name.rpartition(".")[2], _ELSE)
        wrong += bad
        print(f"{Path(name).name}: {here[name]:.1e} here, {far[name]:.1e} there{' WRONG' * bad}")
    print(f"{len(stems)} files, {wrong} wrong")
    sys.exit(bool(wrong))


def _errors(python: list[str], stems: list[str]) -> dict[str, float]:
    done = subprocess.run(
        [*python, str(RUNNER), *stems], check=False, capture_output=True, text=True
    )
    lines = [
        line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line[:5] == "FOUND"
    ]
    found = {told["stem"]: told.get("error", float("inf")) for told in map(json.loads, lines)}
    if missing := [Path(name).name for name in stems if name not in found]:
        print(done.stderr[-2000:])
        sys.exit(f"{python[0]} ended with {done.returncode} before {missing[0]}")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
