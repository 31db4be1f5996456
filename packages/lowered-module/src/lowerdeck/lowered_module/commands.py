"""The command ``lowerdeck lower``: lower a model to a file and print a report."""

from __future__ import annotations

import argparse
import importlib.util
import re
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lowerdeck.emitter import Bounds, EmitConfig
from lowerdeck.inspect import (
    CommandError,
    ExitStatus,
    check_paths,
    installed_entries,
    say,
    writing,
)
from lowerdeck.lowered_module.authoring.registry import PARTITIONERS, installed_partitioner
from lowerdeck.lowered_module.choosing import Trial, lower_fastest, trial_lines
from lowerdeck.lowered_module.errors import LoweringError, in_a_line
from lowerdeck.lowered_module.factories import example_from, partitioner_from, samples_from
from lowerdeck.lowered_module.inspect.accuracy import (
    CALLS,
    OutputAccuracy,
    call_in_eager,
    call_sizes,
    compare_calls,
    inputs_at_bounds,
)
from lowerdeck.lowered_module.inspect.graph_page import graph_html
from lowerdeck.lowered_module.inspect.report import (
    accuracy_lines,
    quantization_lines,
    report_lines,
)
from lowerdeck.lowered_module.pipeline import (
    TRAINS,
    Example,
    LoweredProgram,
    lower_exported,
    trains,
)
from lowerdeck.lowered_module.progress import Stages, buffered_stderr
from lowerdeck.lowered_module.quantization import (
    Quantization,
    find_offer,
    float_weights,
    quantization_names,
    quantize,
)

_TOLERANCE = 1e-4
_DEFAULT = "XnnpackBackend"
_STAGES = ("build", "export", "decompose", "lower", "emit", "write", "check")


class LowerCommand:
    """Lower a model for one or more backends and write a ``.pte`` file."""

    help = "compile a PyTorch model to a .pte file"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command.

        Args:
            parser: The parser of this command.
        """
        parser.add_argument(
            "factory",
            metavar="MODULE:FACTORY",
            help="a function that returns an ExportedProgram, or (module, example_args), or "
            "(module, args, kwargs, dynamic_shapes)",
        )
        parser.add_argument(
            "--backend",
            action="append",
            default=[],
            metavar="NAME",
            help="an installed backend, such as xnnpack, or MODULE:CLASS of any partitioner or "
            "DeclarativeBackend; may be repeated, the first has precedence; none: portable "
            "kernels only; default: xnnpack, if it is installed",
        )
        parser.add_argument(
            "--auto",
            action="store_true",
            help="measure the model in the official runtime, on the example inputs, without a "
            "backend and with each --backend (by default each installed one that the "
            "runtime has), and keep the fastest correct file",
        )
        parser.add_argument(
            "--dynamic",
            type=_batch,
            metavar="batch=MIN:MAX",
            help="export with a dynamic dimension 0, shared by all tensor inputs",
        )
        parser.add_argument(
            "--bounds",
            type=_bounds,
            metavar="SIZE|NAME=SIZE,...",
            help="upper bounds of dynamic dimensions, for planning memory: one number for all "
            "unbounded dimensions, or by name (batch=8, x.1=512 for dimension 1 of input x)",
        )
        parser.add_argument(
            "-o",
            "--output",
            type=Path,
            default=Path("model.pte"),
            metavar="FILE",
            help="the .pte file to write (by default model.pte)",
        )
        parser.add_argument(
            "--check",
            action="store_true",
            help="call the file in lowerdeck.runner, three times with inputs of the example's "
            "sizes, then with the smallest and largest dynamic sizes, and fail if an output or "
            "the state differs from the model's (with --quantize, the float model's)",
        )
        parser.add_argument(
            "--html",
            type=Path,
            metavar="FILE",
            help="also write an HTML page of the lowered graph",
        )
        parser.add_argument(
            "--quantize",
            metavar="MODE",
            help="quantise for the first --backend that supports it, and print the difference of "
            "each output from the float model; XnnpackBackend: int8, int8-dynamic, 8da4w, "
            "fp16",
        )
        parser.add_argument(
            "--calibrate",
            metavar="MODULE:FACTORY",
            help="a function that returns or yields samples of inputs, for --quantize int8; "
            "without it the example inputs are the only sample",
        )
        parser.add_argument(
            "--tolerance",
            type=_tolerance,
            help="largest difference that --check and --auto allow (1e-4); with --quantize, "
            "--check needs it",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Run the command, and return the exit status.

        Returns:
            ``DONE`` if the file was written and, with ``--check``, agrees with the model;
            ``DIFFERS`` if it does not.

        Raises:
            LoweringError: The model cannot be created, exported or lowered.
            lowerdeck.emitter.EmitterError: The lowered program cannot be emitted.
            lowerdeck.inspect.CommandError: Options conflict, or a file cannot be written.
        """
        _refuse_contradictions(args)
        is_free = not args.backend and not args.auto
        default = _DEFAULT if is_free and installed_entries(PARTITIONERS, _DEFAULT) else ""
        args.backend = [
            _full_name(backend)
            for backend in args.backend or [default]
            if backend not in {"", "none"}
        ]
        chosen = None
        if args.quantize is not None:
            has_samples = args.calibrate is not None
            chosen = find_offer(args.quantize, args.backend, has_samples=has_samples)
        tolerance = _TOLERANCE if args.tolerance is None else args.tolerance
        with warnings.catch_warnings(), Stages(_STAGES) as stages:
            # torch warns that its own copies of tree specs are outdated.
            outdated = r"`isinstance\(treespec, LeafSpec\)`"
            warnings.filterwarnings("ignore", message=outdated, category=FutureWarning)
            try:
                lines, accuracy = _lower(args, chosen, tolerance, stages)
            except SystemExit as error:
                # sys.exit() in a model, partitioner or backend must not end the command.
                raise LoweringError(
                    f"lowering {args.factory!r} called sys.exit() ({in_a_line(error)}); "
                    "--debug shows where"
                ) from error
        if not args.auto:
            note = " (the default; --backend none: portable kernels only)" if default else ""
            say(f"backend        {', '.join(args.backend) or 'none: portable kernels'}{note}")
        say(*lines, f"file           {args.output.resolve()}")
        if not args.check or all(backend.largest <= tolerance for backend in accuracy):
            return ExitStatus.DONE
        largest = max(backend.largest for backend in accuracy)
        say(
            f"{args.output} differs from the model by {largest}, more than {tolerance}:",
            *(
                f"  {backend.name} in call {backend.call}: {backend}"
                for backend in accuracy
                if not backend.largest <= tolerance
            ),
        )
        return ExitStatus.DIFFERS


def _refuse_contradictions(args: argparse.Namespace) -> None:
    """Reject options that exclude each other, before a model is built."""
    if args.check and args.quantize and args.tolerance is None:
        raise CommandError(
            "--check with --quantize needs --tolerance: run once without --check to see the "
            "difference, then give a larger one, such as --tolerance 0.1",
            ExitStatus.USAGE,
        )
    check_paths(read=[], written=[("--output", args.output), ("--html", args.html)])
    if args.calibrate is not None and args.quantize is None:
        raise CommandError("--calibrate needs --quantize", ExitStatus.USAGE)
    if args.auto and args.bounds is not None:
        raise CommandError("--auto and --bounds exclude each other", ExitStatus.USAGE)
    if args.auto and args.quantize is not None:
        raise CommandError(
            "--auto compares backends on one program, but --quantize changes the program for "
            "one backend: use one of the two options",
            ExitStatus.USAGE,
        )


def _lower(
    args: argparse.Namespace,
    chosen: tuple[str, Quantization] | None,
    tolerance: float,
    stages: Stages,
) -> tuple[list[str], tuple[OutputAccuracy, ...]]:
    """Write the file; return the lines of the report, and the accuracy."""
    silenced = nullcontext if getattr(args, "debug", False) else buffered_stderr
    with stages.stage("build"):
        model = example_from(args.factory)
        if args.dynamic is not None:
            model = model.with_dynamic_batch(*args.dynamic)
    made_by: dict[str, Any] = {}
    samples: Sequence[Any] = ()
    with stages.stage("quantize" if chosen else "export"), silenced():
        if chosen is None:
            program = model.export(f"what {args.factory!r} returned")
        else:
            backend, offer = chosen
            samples = () if args.calibrate is None else samples_from(args.calibrate)
            program, made_by[backend] = quantize(offer, args.quantize, model, samples)
    if args.bounds is not None and not program.range_constraints:
        raise CommandError(
            "--bounds: the program has no dynamic sizes: export it with --dynamic batch=MIN:MAX "
            "or dynamic_shapes",
            ExitStatus.USAGE,
        )
    trials: Sequence[Trial] = ()
    partitioners = []
    if not args.auto:
        partitioners = [made_by.get(name) or partitioner_from(name) for name in args.backend]
    if args.auto:
        with stages.stage("measure"), silenced():
            lowered, trials = lower_fastest(
                program,
                call_in_eager(model.module, model.args, model.kwargs, 1)[0][0].outputs,
                backends=args.backend or None,
                tolerance=tolerance,
                progress=stages.trial,
            )
    else:
        with silenced():
            lowered = lower_exported(
                {"forward": program},
                {"forward": partitioners},
                stages,
                config=EmitConfig(bounds=args.bounds),
            )
    if args.html is not None:
        page = graph_html(lowered.programs["forward"], title=args.factory)
        with writing(args.html):
            args.html.write_text(page, encoding="utf-8")
    with stages.stage("write"), writing(args.output):
        lowered.save(args.output)
    accuracy, compared = _compared(model, lowered, args.output, args.check, stages)
    lines = list(trial_lines(trials)) if trials else []
    summary = lowered.delegation()
    lines += report_lines(lowered, summary, args.output, stages.seconds)
    if partitioners and not summary.delegates:
        lines.append(f"warning        nothing was delegated to {', '.join(args.backend)}")
    if trains(program):
        lines.append(f"warning        {args.factory} {TRAINS}")
    if chosen is not None:
        lines += quantization_lines(
            args.quantize,
            float_weights(chosen[1], args.quantize, program),
            sum(
                parameter.nbytes
                for parameter in model.module.parameters()
                if parameter.is_floating_point()
            ),
            len(samples) if args.quantize in chosen[1].calibrated else None,
        )
    lines += accuracy_lines(accuracy, compared, quantized=chosen is not None)
    return lines, accuracy


def _tolerance(text: str) -> float:
    """Return a tolerance; reject NaN and negative numbers, which no model could meet."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a tolerance: expected a number of 0 or more"
        )
    return number


def _batch(text: str) -> tuple[int, int]:
    """Return the bounds of a batch size, such as 1 and 8 for ``batch=1:8``."""
    match = re.fullmatch(r"batch=(\d{1,9}):(\d{1,9})", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected batch=MIN:MAX with MIN < MAX, such as batch=1:8"
        )
    return int(match[1]), int(match[2])


def _bounds(text: str) -> Bounds:
    """Return the bounds in a text such as ``64`` or ``batch=8,x.1=512``."""
    if re.fullmatch(r"\d{1,9}", text):
        return int(text)
    bounds: dict[str, Any] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\w+?)(?:\.(\d{1,2}))?=(\d{1,9})", part)
        if match is None:
            raise argparse.ArgumentTypeError(
                f"found {part!r}, expected a size, NAME=SIZE or INPUT.DIMENSION=SIZE"
            )
        if match[2] is None:
            bounds[match[1]] = int(match[3])
        else:
            bounds.setdefault(match[1], {})[int(match[2])] = int(match[3])
    return bounds


def _full_name(backend: str) -> str:
    """Return a backend's full name, such as ``XnnpackBackend`` for ``xnnpack``."""
    if ":" in backend or backend in quantization_names():
        return backend
    return installed_partitioner(backend).name


lower: LowerCommand = LowerCommand()


def _compared(
    model: Example, lowered: LoweredProgram, output: Path, check: bool, stages: Stages
) -> tuple[tuple[OutputAccuracy, ...], str | list[str]]:
    """Return the difference of a file's outputs from the model's, and the compared sizes.

    If the file cannot be compared, return no differences, and the reason instead of the sizes.
    """
    if importlib.util.find_spec("lowerdeck.runner") is None:
        if check:
            raise CommandError(
                "--check needs lowerdeck.runner: install lowerdeck-runner",
                ExitStatus.FAILED,
            )
        return (), "lowerdeck.runner is not installed"
    with stages.stage("check"):
        try:
            from lowerdeck.runner import load

            inputs = model.args, model.kwargs
            others = inputs_at_bounds(lowered.programs["forward"], *inputs) if check else ()
            calls, state = call_in_eager(model.module, *inputs, CALLS if check else 1, others)
            method = load(output).method("forward")
            return compare_calls(calls, method, state, method.state), call_sizes(calls)
        except (Exception, SystemExit) as error:
            # The file may still be usable elsewhere: a backend may lack a runtime here.
            if check:
                raise CommandError(
                    f"{output} cannot be compared: {error}", ExitStatus.FAILED
                ) from error
            return (), str(error)
