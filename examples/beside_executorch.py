"""ResNet-18, float and int8, in the official runtime, beside ExecuTorch's own files of it.

    python -m examples.beside_executorch out/demo [--peer]

Both lower one ``ExportedProgram``, saved and loaded, to XNNPACK, each in a process of its own,
since they call their backend by one name, as the runtime does. What comes of it is one page with
times, sizes, errors, and which kernel ran where. Without ``--peer`` there are only our files: the
peer wants all that executorch depends on, the runtime nothing (``pip install --no-deps``).
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from examples.beside_page import page
from examples.resnet18 import example

FORMS = ("float", "int8")
OURS, PEER = "Lowerdeck", "ExecuTorch"
Told = dict[str, Any]


def export(folder: Path, form: str) -> Told:
    """Save the program, as float or quantised as PyTorch's users do it, and what eager gives."""
    module, inputs = example()
    torch.manual_seed(0)
    with torch.no_grad():
        torch.save((inputs, module(*inputs)), folder / "eager.pt")
        program = torch.export.export(module, inputs)
        if form == "int8":
            pt2e = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
            annotator = importlib.import_module("lowerdeck.xnnpack.quantizer").XnnpackQuantizer()
            prepared = pt2e.prepare_pt2e(program.module(), annotator)
            for _ in range(4):
                prepared(*(torch.randn_like(one) for one in inputs))
            prepared(*inputs)
            program = torch.export.export(pt2e.convert_pt2e(prepared), inputs)
        torch.export.save(program, folder / f"{form}.pt2")
    return {}


def lower_ours(folder: Path, form: str) -> Told:
    """Write our file of a saved program."""
    from lowerdeck.lowered_module import lower

    return _lowered(
        folder, form, OURS, lambda program: lower(program, "XnnpackBackend").to_bytes()
    )


def lower_peer(folder: Path, form: str) -> Told:
    """Write ExecuTorch's file of a saved program, by its own recipe."""
    backend = "executorch.backends.xnnpack.partition.xnnpack_partitioner"
    partitioner = importlib.import_module(backend).XnnpackPartitioner
    to_edge = importlib.import_module("executorch.exir").to_edge_transform_and_lower
    return _lowered(
        folder,
        form,
        PEER,
        lambda program: bytes(
            to_edge(program, partitioner=[partitioner()]).to_executorch().buffer
        ),
    )


def _lowered(folder: Path, form: str, maker: str, lower: Callable[[Any], bytes]) -> Told:
    importlib.import_module(
        "torchao.quantization.pt2e"
    )  # It knows the operators of int8 programs.
    program = torch.export.load(folder / f"{form}.pt2")
    start = time.process_time()
    file = lower(program)
    seconds = time.process_time() - start
    (folder / f"{form}-{maker}.pte").write_bytes(file)
    return {"lowered": seconds, "size": len(file)}


def run(folder: Path, *names: str) -> Told:
    """Run the files in turn in the official runtime, on one thread, and compare with eager."""
    binding = importlib.import_module("executorch.extension.pybindings._portable_lib")
    inputs, expected = torch.load(folder / "eager.pt")
    modules = {name: binding._load_for_executorch(str(folder / name)) for name in names}
    spent: dict[str, list[float]] = {name: [] for name in names}
    told: Told = {}
    for turn in range(21):
        for name, module in modules.items():
            start = time.process_time()
            result = module.run_method("forward", list(inputs))[0]
            spent[name].append(time.process_time() - start)
            if not turn:
                error = float((result - expected).abs().max() / expected.abs().max())
                told[name] = {"error": error}
    for name in names:
        told[name]["run"] = statistics.median(spent[name][1:])
    return told


STEPS = {"export": export, "lower_ours": lower_ours, "lower_peer": lower_peer, "run": run}


def _step(step: str, folder: Path, *args: str) -> Told:
    """Do a step in a process of its own; its last line of output is what came of it."""
    command = [sys.executable, "-m", "examples.beside_executorch", str(folder), "--step", step]
    done = subprocess.run([*command, *args], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{step} {' '.join(args)} ended with {done.returncode}; see above")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _report(folder: Path, file: str) -> str:
    """Return the page about a file, with the times of a run in ``lowerdeck.runner``."""
    trace, page = folder / "trace.json", folder / "report.html"
    # The command is a script beside this Python, as pip installs it.
    command = str(Path(sys.executable).with_name("lowerdeck"))
    torch.save(list(torch.load(folder / "eager.pt")[0]), folder / "inputs.pt")
    for rest in (
        ("run", folder / file, "--input", folder / "inputs.pt", "--trace", trace),
        ("inspect", folder / file, "--html", page, "--trace", trace),
    ):
        subprocess.run([command, *map(str, rest)], check=True, stdout=subprocess.DEVNULL)
    return page.read_text()


def main() -> None:
    """Make the files, run them, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", action="store_true", help="make ExecuTorch's files, too")
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.step:
        print(json.dumps(STEPS[args.step[0]](args.folder, *args.step[1:])))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    made: dict[tuple[str, str], Told] = {}
    for form in FORMS:
        _step("export", args.folder, form)
        made[form, OURS] = _step("lower_ours", args.folder, form)
        if args.peer:
            made[form, PEER] = _step("lower_peer", args.folder, form)
    ran = _step("run", args.folder, *(f"{form}-{maker}.pte" for form, maker in made))
    rows = [(*key, told | ran["{}-{}.pte".format(*key)]) for key, told in made.items()]
    runtime = f"ExecuTorch's official runtime {version('executorch')}"
    print(f"ResNet-18 for XNNPACK; lowering is processor time, a call is timed in {runtime}:")
    for form, maker, told in rows:
        print(
            f"{form:6} {maker:11} lowered in {told['lowered']:6.3f} s, "
            f"{told['size'] / 1e6:.2f} MB, {1000 * told['run']:.1f} ms a call, "
            f"error {told['error']:.1e}"
        )
    names = {form: f"{form}-{OURS}.pte" for form in FORMS}
    reports = {
        f"{name}: which kernel ran where": _report(args.folder, name) for name in names.values()
    }
    (args.folder / "page.html").write_text(page(rows, reports, runtime))
    print(f"all of it, drawn: {args.folder / 'page.html'}")


if __name__ == "__main__":
    main()
