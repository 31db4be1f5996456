"""The command ``lowerdeck run``: call a method, and print its results and times."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from lowerdeck.inspect import CommandError, ExitStatus, check_paths, reading, say, writing
from lowerdeck.runner.commands.inputs import HELP, make_inputs
from lowerdeck.runner.errors import ProgramError
from lowerdeck.runner.loading import load
from lowerdeck.runner.method import LoadedMethod, Memory, read_signature
from lowerdeck.runner.official_runtime import OfficialRuntime
from lowerdeck.runner.profile import shape_text
from lowerdeck.runner.values.inputs import Signature
from lowerdeck.serializer import open_pte, verify_pte


class RunCommand:
    """Run a method of a ``.pte`` file."""

    help = "run a .pte file and show its outputs and timings"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command."""
        parser.add_argument("file", type=Path, metavar="FILE", help="the .pte file")
        parser.add_argument("--method", help="name of the method (forward, or the only one)")
        parser.add_argument("--data", type=Path, metavar="FILE", help="the program's .ptd file")
        parser.add_argument("--input", action="append", default=[], metavar="INPUT", help=HELP)
        parser.add_argument("--seed", type=int, default=0, help="seed of random inputs (0)")
        parser.add_argument("--repeat", type=_count, default=1, help="number of calls (1)")
        parser.add_argument("--profile", action="store_true", help="print times of instructions")
        parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace")
        parser.add_argument(
            "--output", type=Path, metavar="FILE", help="save results (torch.save)"
        )
        parser.add_argument(
            "--no-emulation",
            action="store_true",
            help="run and time it in the official runtime; requires executorch",
        )
        parser.add_argument(
            "--memory",
            choices=get_args(Memory),
            default="strict",
            help="strict: check plan; poison: also fill dead memory; unchecked: neither (strict)",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Run the method, and return the exit code.

        Returns:
            ``DONE``.

        Raises:
            RunnerError: The file cannot be run with these inputs.
            lowerdeck.inspect.CommandError: A file cannot be read or written, or an output is the
                same file as another argument.
        """
        check_paths(
            read=[
                ("FILE", args.file),
                ("--data", args.data),
                *(("--input", text) for text in args.input),
            ],
            written=[
                ("--output", args.output),
                ("--trace", args.trace),
            ],
        )
        if args.no_emulation:
            _run_officially(args)
        else:
            _run(args)
        return ExitStatus.DONE


def _run_officially(args: argparse.Namespace) -> None:
    """Run the method in the official runtime."""
    if args.profile or args.trace or args.memory != "strict":
        raise CommandError(
            "--profile, --trace and --memory need emulation: remove them or --no-emulation",
            ExitStatus.USAGE,
        )
    with reading(args.file), open_pte(args.file) as file:
        name = args.method or _usual_method(file.method_names)
        if name not in file.method_names:
            raise ProgramError(
                f"there is no method {name!r}; the program has {', '.join(file.method_names)}"
            )
        plan = file.method(name)
        # The official runtime may crash on files that this check rejects.
        verify_pte(file.data)
    inputs = make_inputs(plan, args.input, args.seed)
    with OfficialRuntime(extra_kernels=True) as runtime:
        runtime.load(args.file, args.data)
        # Warm up: the first call allocates memory.
        runtime.run(inputs, name)
        calls = runtime.run(inputs, name, repeat=args.repeat)
        _print_inputs(inputs)
        _print_outputs(read_signature(plan), calls.outputs)
        least, median = min(calls.seconds) * 1e3, statistics.median(calls.seconds) * 1e3
        of = f" (median of {args.repeat}, least {least:.3f})" if args.repeat > 1 else ""
        say(f"{name}: {median:.3f} ms a call in {runtime.name}, on this machine{of}")
    if args.output is not None:
        _save(calls.outputs, args.output)


def _run(args: argparse.Namespace) -> None:
    with reading(args.file):
        program = load(args.file, data=args.data, memory=args.memory)
    method = program.method(args.method or _usual_method(program.methods))
    inputs = make_inputs(method.plan, args.input, args.seed)
    outputs: list[Any] = []
    start = time.perf_counter()
    for _ in range(args.repeat):
        outputs = method.run_flat(inputs)
    seconds = (time.perf_counter() - start) / args.repeat
    _print_inputs(inputs)
    _print_outputs(method.signature, outputs)
    say(
        f"{method.name}: {seconds * 1e3:.3f} ms a call in lowerdeck.runner, which emulates the "
        "runtime in Python: not a device's speed"
    )
    if args.output is not None:
        _save(method.signature.unflatten(outputs), args.output)
    if args.profile or args.trace is not None:
        _report_profile(method, inputs, args)


def _print_inputs(values: Sequence[object]) -> None:
    """Print the dtype and sizes of each input; dynamic sizes default to their maximum."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if tensors:
        say(f"inputs: {', '.join(map(shape_text, tensors))}")


def _print_outputs(signature: Signature, values: Iterable[object]) -> None:
    for name, value in zip(signature.output_names, values, strict=True):
        say(f"{name}: {_describe(value)}")


def _save(result: object, path: Path) -> None:
    # torch.save raises RuntimeError for a missing folder.
    with writing(path), path.open("wb") as file:
        torch.save(result, file)


def _report_profile(method: LoadedMethod, inputs: list[Any], args: argparse.Namespace) -> None:
    """Call the method again, and print or save its profile."""
    profile = method.profile(*inputs)
    if args.profile:
        for line in (*profile.table().split("\n"), "", *profile.table(by_name=True).split("\n")):
            say(line)
    if args.trace is not None:
        with writing(args.trace):
            profile.save_trace(args.trace)
        say(f"trace: {args.trace} (open it in https://ui.perfetto.dev or chrome://tracing)")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of calls; expected 1 or more")
    return number


def _usual_method(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else "forward"


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    name = shape_text(value)
    if value.numel() == 0:
        return name
    flat = value.flatten()
    head = ", ".join(f"{item:.6g}" for item in flat[:6].tolist())
    more = ", ..." if flat.numel() > 6 else ""
    if not value.dtype.is_floating_point:
        return f"{name} = [{head}{more}]"
    wide = flat.double()
    spread = f"min {wide.min():.6g}, mean {wide.mean():.6g}, max {wide.max():.6g}"
    return f"{name} = [{head}{more}], {spread}"
