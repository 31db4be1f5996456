"""The command ``lowerdeck lower``: from a model to a file, with what a person wants to see."""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from lowerdeck.lowered_module.authoring.quantization import Quantization, Sample
from lowerdeck.lowered_module.authoring.registry import find_partitioner, installed_partitioner
from lowerdeck.lowered_module.choosing import Trial, lower_fastest, trial_lines
from lowerdeck.lowered_module.errors import LoweringError
from lowerdeck.lowered_module.inspect.accuracy import (
    CALLS,
    OutputAccuracy,
    accuracy_of,
    call_in_eager,
    compare_calls,
)
from lowerdeck.lowered_module.inspect.float_weights import FloatWeight
from lowerdeck.lowered_module.inspect.graph_page import graph_html
from lowerdeck.lowered_module.inspect.report import LoweringFigures, figures_of, report_lines
from lowerdeck.lowered_module.pipeline import (
    LoweredProgram,
    decomposed_where_partitioned,
    in_a_line,
    lower_decomposed,
    separate_inputs,
)
from lowerdeck.lowered_module.program.held_messages import held_messages
from lowerdeck.lowered_module.quantizing import (
    chosen_quantization,
    float_weights,
    quantized,
    samples_from,
)
from lowerdeck.lowered_module.stages import Stages
from lowerdeck.serializer import CommandError, ExitStatus, keep_apart, say, writing
from lowerdeck.torch_base import copy_module, pytree

_SAMPLES = "MODULE:FACTORY, such as mymodel:samples"
_OF_PARTITIONERS = ("__call__", "ops_to_not_decompose")
_TOLERANCE = 1e-4
_STAGES = ("build", "export", "decompose", "lower", "emit", "write", "check")
_Example = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]


class LowerCommand:
    """Lowers a model for one or more backends and writes a ``.pte`` file."""

    help = "export a model, give parts of it to a backend, and write a .pte file"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command.

        Args:
            parser: The parser of this command.
        """
        parser.add_argument(
            "factory",
            metavar="MODULE:FACTORY",
            help="a function that returns (module, example_args) or (module, args, kwargs)",
        )
        parser.add_argument(
            "--backend",
            action="append",
            default=[],
            metavar="NAME",
            help="a backend whose installed partitioner chooses nodes, or MODULE:CLASS of any "
            "partitioner; may be repeated, the first chooses first; without it everything stays "
            "with the portable kernels",
        )
        parser.add_argument(
            "--auto",
            action="store_true",
            help="try no backend and each one named by --backend (without it, each installed one "
            "that the official runtime has) in that runtime, on the example inputs, and keep the "
            "fastest that is right; prints each on standard error as it is done, and all at the "
            "end",
        )
        parser.add_argument("-o", "--output", type=Path, default=Path("model.pte"), metavar="FILE")
        parser.add_argument(
            "--check",
            action="store_true",
            help="call the file three times with different inputs in lowerdeck.runner and fail "
            "if an output or the state differs from eager's",
        )
        parser.add_argument(
            "--html", type=Path, metavar="FILE", help="also draw the lowered graph, for a browser"
        )
        parser.add_argument(
            "--quantize",
            metavar="MODE",
            help="quantise for the first --backend that offers it, and print how far each output "
            "is from the model's own; XnnpackBackend: int8, int8-dynamic, 8da4w, fp16",
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
        """Do it, and return the exit code.

        Args:
            args: The parsed arguments.

        Returns:
            ``DONE`` if the file was written and, with ``--check``, agrees with eager; ``DIFFERS``
            if it does not.

        Raises:
            LoweringError: The model cannot be made, exported or lowered.
            lowerdeck.emitter.EmitterError: It cannot be emitted.
            lowerdeck.serializer.CommandError: The file cannot be written.
        """
        tolerance = args.tolerance if args.tolerance is not None else _TOLERANCE
        if args.check and args.quantize and args.tolerance is None:
            raise CommandError(
                "--check compares with the model's own floats, from which a quantised one is "
                "further off, some by 0.001 and others by 10, as their outputs are large: run "
                "it without --check, which prints how far each output is, and then give "
                "somewhat more than that, as in --tolerance 0.1",
                ExitStatus.USAGE,
            )
        figures = lower_model(
            args.factory,
            args.backend,
            args.output,
            check=args.check or None,
            html=args.html,
            quantize=args.quantize,
            calibrate=args.calibrate,
            auto=tolerance if args.auto else None,
            debug=getattr(args, "debug", False),
        )
        say(*report_lines(figures))
        if not args.check or (figures.difference is not None and figures.difference <= tolerance):
            return ExitStatus.DONE
        say(
            f"{args.output} differs from eager by {figures.difference}, more than {tolerance}:",
            *(
                f"  {one.name} in call {one.call}: {one}"
                for one in figures.accuracy
                if not one.largest <= tolerance
            ),
        )
        return ExitStatus.DIFFERS


def _tolerance(text: str) -> float:
    """Return a difference that may be allowed: with NaN or less than 0, every model differs."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not found >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no difference, which is 0 or more")
    return found


lower: LowerCommand = LowerCommand()


def lower_model(
    factory: str,
    backends: Sequence[str],
    output: Path,
    *,
    check: bool | None = None,
    html: Path | None = None,
    quantize: str | None = None,
    calibrate: str | None = None,
    auto: float | None = None,
    debug: bool = False,
) -> LoweringFigures:
    """Lower the model that ``factory`` makes into the file ``output`` and return the figures.

    Args:
        factory: ``"package.module:function"``.
        backends: Names of installed partitioners, the first choosing first.
        output: Where the file goes, in a folder that is there.
        check: Compare with eager: True demands ``lowerdeck.runner``, None compares if it is
            installed, False does not.
        html: Where a page with the lowered graph goes, if wanted.
        quantize: A mode of a backend among ``backends`` that quantises.
        calibrate: ``"package.module:function"`` that makes samples of inputs for that.
        auto: How far outputs may be from eager's, to keep the fastest of several lowerings; None
            to give ``backends`` what they take, in their order.
        debug: Whether torch's own messages are shown also where it fails.

    Raises:
        LoweringError: The factory cannot be used, or its model cannot be exported or lowered.
        lowerdeck.emitter.EmitterError: It cannot be emitted.
        lowerdeck.serializer.CommandError: A file cannot be written, or not be compared here, or
            two outputs are one file, or one is the source of what was named.
    """
    written = [("--output", output), ("--html", html)]
    keep_apart(read=[], written=written)
    if calibrate is not None and quantize is None:
        raise CommandError("--calibrate is for --quantize, which is not given", ExitStatus.USAGE)
    if auto is not None and quantize is not None:
        raise CommandError(
            "--auto compares lowerings of one program, and --quantize makes another for one "
            "backend: give one of them",
            ExitStatus.USAGE,
        )
    chosen = None
    if quantize is not None:
        chosen = chosen_quantization(quantize, backends, calibrate=calibrate is not None)
    told = nullcontext if debug else held_messages
    with _torch_quiet(), _outlived(factory), Stages(_STAGES) as stages:
        with stages.stage("build"):
            model = load_example(factory)
        with stages.stage("quantize" if chosen else "export"), told():
            made = None if chosen is None else _quantized(chosen, calibrate, model)
            program = _exported(factory, model) if made is None else made.program
        made_by = {} if made is None else {made.backend: made.partitioner}
        partitioners: list[Any] = []
        if auto is None:
            partitioners = [made_by.get(name) or _partitioner(name) for name in backends]
        # Modules that are named have been imported by now, so that their files are known.
        read = [factory, *backends, *([calibrate] if calibrate else [])]
        keep_apart(read=_sources(read), written=written)
        trials: Sequence[Trial] = ()
        if auto is not None:
            for name in backends:
                installed_partitioner(name)
            with stages.stage("measure"), told():
                lowered, trials = lower_fastest(
                    program,
                    _repeated(model, factory, auto),
                    backends=backends or None,
                    tolerance=auto,
                    progress=stages.trial,
                )
        else:
            by_method = {"forward": partitioners}
            with stages.stage("decompose"), told():
                programs = decomposed_where_partitioned(by_method, {"forward": program})
            lowered = lower_decomposed(programs, by_method, stages)
        if html is not None:
            _draw(lowered, partitioners, html, factory)
        with stages.stage("write"), writing(output):
            lowered.save(output)
        accuracy, not_compared = _compared(model, output, check, stages)
    difference = None
    if accuracy is not None:
        difference = max((one.largest for one in accuracy), default=0.0)
    summary = lowered.delegation()
    figures = figures_of(lowered, summary, output, stages.seconds, difference, not_compared)
    lines = tuple(trial_lines(trials)) if trials else ()
    figures = replace(figures, accuracy=accuracy or (), trials=lines)
    if made is None:
        return figures
    weights = sum(one.nbytes for one in model[0].parameters() if one.is_floating_point())
    return replace(
        figures,
        is_quantized=True,
        calibrated=made.samples,
        float_weights=made.float_weights,
        weight_bytes=weights,
        mode=quantize or "",
    )


def _eager(model: _Example) -> list[Any]:
    """Return what eager gives, flat; the state that the program begins with stays as it is."""
    module, inputs, named = model
    module = copy_module(module, share_parameters=True)
    with torch.no_grad():
        return list(pytree.tree_leaves(module(*copy.deepcopy(inputs), **copy.deepcopy(named))))


def _repeated(model: _Example, factory: str, tolerance: float) -> list[Any]:
    """Return what eager gives, where it gives that again: nothing else tells what is right."""
    wanted, again = _eager(model), _eager(model)
    difference = max((one.largest for one in accuracy_of(again, wanted)), default=0.0)
    if not difference <= tolerance:
        raise LoweringError(
            f"the outputs of {factory!r} differ by {difference:.3g} between two calls of eager "
            "with the same inputs, so that no file can be told to be right: take random "
            "operators out (dropout: .eval()), or lower without --auto"
        )
    return wanted


@dataclass(frozen=True, slots=True)
class _Quantized:
    """A quantised model: its program, and who takes it."""

    backend: str
    program: ExportedProgram
    partitioner: Any
    samples: int | None
    float_weights: tuple[FloatWeight, ...]


def _quantized(
    chosen: tuple[str, str, Quantization], calibrate: str | None, model: _Example
) -> _Quantized:
    """Return what the backend that was chosen makes of a model."""
    backend, mode, offer = chosen
    module, inputs, named = model
    samples: list[Sample] = []
    if calibrate is not None:
        samples = samples_from(calibrate, _named(calibrate, _SAMPLES))
    given = samples or [(inputs, named)]
    program, partitioner = quantized(offer, mode, module, inputs, named, given)
    counted = len(samples) if mode in offer.calibrated else None
    left = float_weights(offer, mode, program)
    return _Quantized(backend, program, partitioner, counted, left)


def _draw(lowered: LoweredProgram, partitioners: Sequence[Any], html: Path, title: str) -> None:
    """Write the page that ``--html`` asks for."""
    reasons: dict[str, str] = {}
    for partitioner in partitioners:
        reasons |= getattr(partitioner, "refused", {})
    page = graph_html(lowered.programs["forward"], reasons=reasons, title=title)
    with writing(html):
        html.write_text(page, encoding="utf-8")


def _compared(
    model: _Example, output: Path, check: bool | None, stages: Stages
) -> tuple[tuple[OutputAccuracy, ...] | None, str]:
    """Return how far the outputs of a file are from eager's, or None and why that is not known."""
    if check is False:
        return None, "not asked for"
    if not _can_run(demanded=bool(check)):
        return None, "lowerdeck.runner is not installed"
    with stages.stage("check"):
        try:
            return _accuracy(model, output, CALLS if check else 1), ""
        except (Exception, SystemExit) as error:
            # The file may well run elsewhere: a backend can lack a runtime half here.
            if check:
                raise CommandError(
                    f"{output} cannot be compared: {error}", ExitStatus.FAILED
                ) from error
            return None, str(error)


def load_example(factory: str) -> _Example:
    """Return the module and example inputs that ``"package.module:function"`` makes.

    Args:
        factory: Where the function is; modules are also looked for in the current folder.

    Raises:
        LoweringError: There is no such function, or it returns something else.
    """
    made = _named(factory, "MODULE:FACTORY, such as mymodel:example")
    if not callable(made):
        raise LoweringError(
            f"{factory!r} is a {type(made).__name__}, expected a function that returns (module, "
            "example_args)"
        )
    try:
        found = made()
    except (Exception, SystemExit) as error:
        raise LoweringError(
            f"{factory!r} raised {in_a_line(error)}; it is called without arguments, and must "
            "return (module, example_args) or (module, example_args, example_kwargs)"
        ) from error
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise LoweringError(
            f"{factory!r} returned {type(found).__name__}, expected (module, example_args) or "
            "(module, example_args, example_kwargs)"
        )
    module, args, kwargs = found if len(found) == 3 else (*found, {})
    if not isinstance(module, torch.nn.Module) or not isinstance(kwargs, Mapping):
        raise LoweringError(
            f"{factory!r} returned ({', '.join(type(one).__name__ for one in found)}), expected "
            "a torch.nn.Module, its arguments, and perhaps a dict of keyword arguments"
        )
    inputs = tuple(args) if isinstance(args, (list, tuple)) else (args,)
    with suppress(NotImplementedError):
        # What PT2E converted has no modes, and says so.
        module.eval()
    return module, *separate_inputs(module, inputs, kwargs)


def _named(text: str, expected: str) -> Any:
    """Return what ``"package.module:path"`` names."""
    module, _, path = text.partition(":")
    if not module or not path:
        raise LoweringError(f"found {text!r}, expected {expected}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        made: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        stem = Path(module).stem
        cure = "install it, or start the command in the folder that holds it"
        if module == f"{stem}.py":
            cure = f"give the module without .py: {stem}:{path}"
        raise LoweringError(
            f"module {module!r} of {text!r} cannot be imported ({error}): {cure}"
        ) from error
    except (Exception, SystemExit) as error:
        raise LoweringError(
            f"module {module!r} of {text!r} cannot be imported: {in_a_line(error)}"
        ) from error
    for name in path.split("."):
        if not hasattr(made, name):
            raise LoweringError(f"{text!r}: {made!r} has no {name!r}")
        made = getattr(made, name)
    return made


def _partitioner(name: str) -> Any:
    """Return the installed partitioner of this name, or one made of ``"package.module:Class"``."""
    made: Any
    try:
        if ":" not in name:
            made = find_partitioner(name)
        else:
            made = _named(name, "the name of a backend, or MODULE:CLASS of a partitioner")
            made = made() if isinstance(made, type) else made
    except LoweringError:
        raise
    except (Exception, SystemExit) as error:
        raise LoweringError(
            f"{name!r} cannot be made without arguments: {in_a_line(error)}; name a partitioner "
            "that is made already"
        ) from error
    missing = [part for part in _OF_PARTITIONERS if not callable(getattr(made, part, None))]
    if missing:
        raise LoweringError(
            f"{name!r} is a {type(made).__name__} without {' and '.join(missing)}, expected a "
            "partitioner: derive it from lowerdeck.lowered_module.Partitioner"
        )
    return made


def _sources(names: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the files of the modules that ``"package.module:path"`` names."""
    for name in names:
        module = sys.modules.get(name.partition(":")[0]) if ":" in name else None
        yield name, getattr(module, "__file__", None)


def _exported(factory: str, model: _Example) -> ExportedProgram:
    module, inputs, named = model
    try:
        return torch.export.export(module, inputs, named)
    except (Exception, SystemExit) as error:
        raise LoweringError(
            f"torch.export cannot export what {factory!r} returned: {in_a_line(error)}; "
            "--debug shows where"
        ) from error


@contextmanager
def _torch_quiet() -> Iterator[None]:
    """Keep torch from telling users that torch's own copies of tree specs are outdated."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning
        )
        yield


@contextmanager
def _outlived(factory: str) -> Iterator[None]:
    """Let no code of a model, a partitioner or a backend end the process."""
    try:
        yield
    except SystemExit as error:
        raise LoweringError(
            f"code that lowering {factory!r} runs ended with {in_a_line(error)}; --debug shows "
            "where"
        ) from error


def _can_run(*, demanded: bool) -> bool:
    installed = importlib.util.find_spec("lowerdeck.runner") is not None
    if demanded and not installed:
        raise CommandError(
            "--check needs lowerdeck.runner: pip install lowerdeck-lowered-module[run]",
            ExitStatus.FAILED,
        )
    return installed


def _accuracy(model: _Example, path: Path, count: int) -> tuple[OutputAccuracy, ...]:
    """Return how far outputs and state of the file are from eager's, over several calls."""
    from lowerdeck.runner import load

    calls, state = call_in_eager(*model, count)
    method = load(path).method("forward")
    return compare_calls(calls, method, state, method.state)
