"""The command ``lowerdeck lower``: from a model to a file, with what a person wants to see."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from tqdm import tqdm  # type: ignore[import-untyped]

from lowerdeck.emitter import emit
from lowerdeck.lowered_module._torch_private import pytree
from lowerdeck.lowered_module.errors import LoweringError
from lowerdeck.lowered_module.graph_page import graph_html
from lowerdeck.lowered_module.lowering import to_backend
from lowerdeck.lowered_module.registry import find_partitioner
from lowerdeck.lowered_module.report import LoweringFigures, figures_of, report_lines

STAGES = ("build", "export", "decompose", "lower", "emit", "write", "check")


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
            help="a backend whose installed partitioner chooses nodes; may be repeated, the "
            "first chooses first; without it everything stays with the portable kernels",
        )
        parser.add_argument("-o", "--output", type=Path, default=Path("model.pte"), metavar="FILE")
        parser.add_argument(
            "--check",
            action="store_true",
            help="run the file in lowerdeck.runner and fail if it differs from eager",
        )
        parser.add_argument(
            "--html", type=Path, metavar="FILE", help="also draw the lowered graph, for a browser"
        )
        parser.add_argument(
            "--tolerance", type=float, default=1e-4, help="largest difference that --check allows"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Do it, and return the exit code.

        Args:
            args: The parsed arguments.

        Returns:
            0 if the file was written and, with ``--check``, agrees with eager; else 1.
        """
        try:
            figures = lower_model(
                args.factory, args.backend, args.output, check=args.check or None, html=args.html
            )
        except LoweringError as error:
            print(f"lowerdeck lower: {error}", file=sys.stderr)
            return 1
        for line in report_lines(figures):
            print(line)
        if args.check and (figures.difference is None or figures.difference > args.tolerance):
            print(
                f"lowerdeck lower: the file differs from eager by {figures.difference}, more than "
                f"{args.tolerance}",
                file=sys.stderr,
            )
            return 1
        return 0


lower: LowerCommand = LowerCommand()


def lower_model(
    factory: str,
    backends: Sequence[str],
    output: Path,
    *,
    check: bool | None = None,
    html: Path | None = None,
) -> LoweringFigures:
    """Lower the model that ``factory`` makes into the file ``output`` and return the figures.

    Args:
        factory: ``"package.module:function"``.
        backends: Names of installed partitioners, the first choosing first.
        output: Where the file goes; its folder is made.
        check: Compare with eager: True demands ``lowerdeck.runner``, None compares if it is
            installed, False does not.
        html: Where a page with the lowered graph goes, if wanted.

    Raises:
        LoweringError: The factory cannot be used, or the runner is missing.
    """
    seconds: dict[str, float] = {}
    with _torch_quiet(), tqdm(total=len(STAGES), unit="stage", disable=None, leave=False) as bar:
        with _stage(bar, seconds, "build"):
            module, inputs, named = load_example(factory)
        with _stage(bar, seconds, "export"):
            program = torch.export.export(module, inputs, named)
        partitioners = [find_partitioner(name) for name in backends]
        with _stage(bar, seconds, "decompose"):
            program = _decomposed(program, partitioners)
        before = program
        with _stage(bar, seconds, "lower"):
            reasons: dict[str, str] = {}
            for partitioner in partitioners:
                program = to_backend(program, partitioner, progress=_shown_on(bar))
                reasons |= getattr(partitioner, "refused", {})
        if html is not None:
            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(graph_html(program, reasons=reasons, title=factory), encoding="utf-8")
        with _stage(bar, seconds, "emit"):
            emitted = emit(program)
        with _stage(bar, seconds, "write"):
            output.parent.mkdir(parents=True, exist_ok=True)
            emitted.save(output)
        difference, not_compared = None, "not asked for"
        if check is not False and not _can_run(demanded=bool(check)):
            not_compared = "lowerdeck.runner is not installed"
        elif check is not False:
            with _stage(bar, seconds, "check"):
                try:
                    difference = _difference(module, inputs, named, output)
                except Exception as error:
                    # The file may well run elsewhere: a backend can lack a runtime half here.
                    if check:
                        raise LoweringError(f"{output} cannot be compared: {error}") from error
                    not_compared = str(error)
    return figures_of(before, program, emitted, output, seconds, difference, not_compared)


def load_example(factory: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the module and example inputs that ``"package.module:function"`` makes.

    Args:
        factory: Where the function is; modules are also looked for in the current folder.

    Raises:
        LoweringError: There is no such function, or it returns something else.
    """
    place, _, path = factory.partition(":")
    if not place or not path:
        raise LoweringError(f"found {factory!r}, expected MODULE:FACTORY, such as mymodel:example")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        made: Any = importlib.import_module(place)
    except ModuleNotFoundError as error:
        stem = Path(place).stem
        cure = "install it, or start the command in the folder that holds it"
        if place == f"{stem}.py":
            cure = f"give the module without .py: {stem}:{path}"
        raise LoweringError(f"module {place!r} cannot be imported ({error}): {cure}") from error
    for name in path.split("."):
        if not hasattr(made, name):
            raise LoweringError(f"{factory!r}: {made!r} has no {name!r}")
        made = getattr(made, name)
    found = made()
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise LoweringError(
            f"{factory!r} returned {type(found).__name__}, expected (module, example_args) or "
            "(module, example_args, example_kwargs)"
        )
    inputs = found[1] if isinstance(found[1], tuple) else (found[1],)
    return found[0].eval(), inputs, dict(found[2]) if len(found) == 3 else {}


@contextmanager
def _torch_quiet() -> Iterator[None]:
    """Keep torch from telling users that torch's own copies of tree specs are outdated."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning
        )
        yield


@contextmanager
def _stage(bar: Any, seconds: dict[str, float], name: str) -> Iterator[None]:
    bar.set_description(name)
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
    bar.set_postfix_str("")
    bar.update()


def _shown_on(bar: Any) -> Callable[[int, int, str], None]:
    def show(done: int, total: int, place: str) -> None:
        bar.set_postfix_str(f"partition {done} of {total}: {place}")

    return show


def _decomposed(program: ExportedProgram, partitioners: Sequence[Any]) -> ExportedProgram:
    table: Any = torch.export.default_decompositions()
    for partitioner in partitioners:
        kept, wanted = partitioner.ops_to_not_decompose(program)
        if wanted is None:
            for operator in kept:
                table.pop(operator, None)
    return cast("ExportedProgram", program.run_decompositions(table))


def _can_run(*, demanded: bool) -> bool:
    installed = importlib.util.find_spec("lowerdeck.runner") is not None
    if demanded and not installed:
        raise LoweringError(
            "--check needs lowerdeck.runner: pip install lowerdeck-lowered-module[run]"
        )
    return installed


def _difference(
    module: torch.nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], path: Path
) -> float:
    """Return the largest difference between the file and eager, infinite where shapes differ."""
    from lowerdeck.runner import load

    with torch.no_grad():
        wanted = pytree.tree_leaves(module(*inputs, **named))
    found = pytree.tree_leaves(load(path).run("forward", *inputs, **named))
    if len(found) != len(wanted):
        return float("inf")
    largest = 0.0
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            if one.shape != other.shape:
                return float("inf")
            if other.numel():
                gap = (one.to(torch.float64) - other.to(torch.float64)).abs().max().item()
                largest = max(largest, gap)
        elif one != other:
            return float("inf")
    return largest
