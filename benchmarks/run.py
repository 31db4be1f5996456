"""Benchmark every package against its peers; write ``RESULTS.md`` and the README's table.

``nox -s bench`` measures all; ``-- unflatten`` measures one again and keeps the others' records;
``-- --redraw`` measures nothing; ``-- --quick`` takes small sizes, and writes to ``out/bench``, as
does ``-- openvino --models "torchvision/*" own/mlp``, which takes some models only, as does
xnnpack_models.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.page import page  # noqa: E402  (this folder is a script, not a package)
from benchmarks.readme import with_table  # noqa: E402
from benchmarks.records import Record  # noqa: E402

_OF_MODELS = ("openvino", "xnnpack_models")


def main() -> None:
    """Measure the chosen packages, each in a separate process, and write the page."""
    known = [path.stem.removeprefix("bench_") for path in sorted(HERE.glob("bench_*.py"))]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", help="import names; all when none is given")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a first look")
    parser.add_argument(
        "--models", nargs="+", default=[], metavar="PATTERN", help="only these models, by name"
    )
    parser.add_argument("--redraw", action="store_true", help="only write the page anew")
    parser.add_argument("--output", type=Path, help="folder for the page and the records")
    args = parser.parse_args()
    if unknown := set(args.packages) - set(known):
        parser.error(f"no benchmarks for {', '.join(sorted(unknown))}; there are {known}")
    if args.models and not args.packages:
        parser.error(f"--models wants packages that have models: {', '.join(_OF_MODELS)}")
    if args.models and (without := set(args.packages) - set(_OF_MODELS)):
        parser.error(f"{', '.join(sorted(without))}: no choice of models")
    # Small sizes, and a few models, must not replace the results that the README shows.
    some = args.quick or args.models
    output = args.output or (HERE.parent / "out" / "bench" if some else HERE)
    records = {name: output / "records" / f"{name}.json" for name in known}
    chosen = [] if args.redraw else args.packages or known
    failed: list[str] = []
    for name in chosen:
        worker = [sys.executable, str(HERE / "measure.py"), name, str(records[name]), _command()]
        worker += ["--quick"] if args.quick else []
        worker += ["--models", *args.models] if args.models else []
        # A fault in one package must not cost the hour that the others took: the page tells it.
        if subprocess.run(worker, check=False, cwd=HERE.parent).returncode:
            failed.append(name)
        _write(output, records)
    _write(output, records)
    print(f"wrote {output / 'RESULTS.md'}")
    if failed:
        sys.exit(f"did not finish: {', '.join(failed)}")


def _write(output: Path, paths: dict[str, Path]) -> None:
    """Write the page of all records there are."""
    records = [Record.load(path) for path in paths.values() if path.exists()]
    if records:
        (output / "RESULTS.md").write_text("\n".join(page(records)) + "\n")
    if output == HERE:
        readme = HERE.parent / "README.md"
        readme.write_text(with_table(readme.read_text(), records))


def _command() -> str:
    if os.environ.get("NOX_CURRENT_SESSION") == "bench":
        return shlex.join(["nox", "-s", "bench", *(["--", *sys.argv[1:]] if sys.argv[1:] else [])])
    return shlex.join(["python", "benchmarks/run.py", *sys.argv[1:]])


if __name__ == "__main__":
    main()
