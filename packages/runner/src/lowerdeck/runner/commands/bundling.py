"""The command ``lowerdeck bundle``: write and run programs with test cases."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from lowerdeck.inspect import ExitStatus, check_paths, reading, say, writing
from lowerdeck.runner._torch_private import leaves
from lowerdeck.runner.bundles import CaseOutcome, check_bundle, make_bundle
from lowerdeck.runner.commands.given_inputs import HELP, load_values, make_inputs
from lowerdeck.runner.commands.numbers import count, method_name, seed
from lowerdeck.runner.errors import InputError
from lowerdeck.runner.loading import load
from lowerdeck.serializer import BundledProgram, deserialize_bundle, is_bundle, write_bundle


class BundleCommand:
    """Write ``.bpte`` files, and run the test cases of existing ones."""

    help = "add test cases to a .pte file, or check those it has"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command.

        Args:
            parser: The parser of this command.
        """
        parser.add_argument(
            "file",
            type=Path,
            metavar="FILE",
            help="a .pte file to put test cases to, or a .bpte file whose cases are tried",
        )
        parser.add_argument(
            "-o",
            "--output",
            type=Path,
            metavar="FILE",
            help="the .bpte file to write; of a .bpte file, the .pte file in it",
        )
        parser.add_argument("--data", type=Path, metavar="FILE", help="the program's .ptd file")
        parser.add_argument("--method", help="name of the method (forward, or the only one)")
        parser.add_argument("--input", action="append", default=[], metavar="INPUT", help=HELP)
        parser.add_argument("--cases", type=count, default=1, help="number of test cases (1)")
        parser.add_argument("--seed", type=seed, default=0, help="seed of random inputs (0)")
        parser.add_argument(
            "--expected",
            type=Path,
            metavar="FILE",
            help="the results of the one case, as torch.save wrote them; without it they are "
            "computed here, by the program itself",
        )
        parser.add_argument(
            "--rtol", type=_tolerance, default=1e-5, help="how far results may be off, relative"
        )
        parser.add_argument(
            "--atol", type=_tolerance, default=1e-8, help="how far results may be off, absolute"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Write or run test cases, and return the exit code.

        Returns:
            ``DONE``, or ``DIFFERS`` where a test case does not give what it expects.

        Raises:
            RunnerError: The program cannot be run, or not with these inputs.
            lowerdeck.serializer.SerializerError: A file cannot be read or written.
        """
        check_paths(
            read=[
                ("FILE", args.file),
                ("--data", args.data),
                ("--expected", args.expected),
                *(("--input", text) for text in args.input),
            ],
            written=[("--output", args.output)],
        )
        with reading(args.file):
            content = args.file.read_bytes()
        if is_bundle(content):
            return _try(deserialize_bundle(content), args)
        return _write(content, args)


def _write(content: bytes, args: argparse.Namespace) -> int:
    if args.output is None:
        raise InputError("found no --output, expected where to write the .bpte file")
    if args.expected is not None and args.cases != 1:
        raise InputError(f"found --expected and {args.cases} cases; it holds the results of one")
    loaded = load(content, data=args.data)
    method = loaded.method(method_name(loaded.methods, args.method))
    cases = [
        make_inputs(method.plan, args.input, args.seed + i, quiet=i > 0) for i in range(args.cases)
    ]
    expected: Any = None
    if args.expected is not None:
        results = leaves(load_values(args.expected, "--expected"))
        expected = {method.name: lambda *_: results}
    bundle = make_bundle(content, {method.name: cases}, expected, data=args.data)
    with writing(args.output):
        size = write_bundle(bundle, args.output)
    by = "given" if args.expected is not None else "computed by the program itself"
    say(f"{args.output}: {size} bytes, {args.cases} test cases of {method.name}, results {by}")
    return ExitStatus.DONE


def _try(bundle: BundledProgram, args: argparse.Namespace) -> int:
    outcomes = check_bundle(bundle, data=args.data, rtol=args.rtol, atol=args.atol)
    for outcome in outcomes:
        say(_told(outcome))
    wrong = sum(not outcome.right for outcome in outcomes)
    say(f"{len(outcomes)} test cases, {wrong} wrong; in lowerdeck.runner, which emulates a device")
    if args.output is not None:
        with writing(args.output):
            args.output.write_bytes(bundle.program)
    return ExitStatus.DIFFERS if wrong else ExitStatus.DONE


def _told(outcome: CaseOutcome) -> str:
    far = max(outcome.differences, default=0.0)
    word = "right" if outcome.right else "WRONG"
    detail = "another shape, type or NaN" if math.isinf(far) else f"off by up to {far:.4g}"
    return f"{outcome.method}, test case {outcome.number}: {word}, {detail}"


def _tolerance(text: str) -> float:
    """Return a tolerance."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a tolerance, which is 0 or more")
    return number
