"""Run every package's benchmarks beside its peers and write ``benchmarks/RESULTS.md``.

Run as ``nox -s bench`` (``nox -s bench -- --quick serializer`` for small sizes of one package).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import platform
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.harness import Row, table  # noqa: E402  (this folder is a script, not a package)


def main() -> None:
    """Measure the chosen packages, print the rows as they come, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", help="import names; all when none is given")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a first look")
    parser.add_argument("--output", type=Path, default=HERE / "RESULTS.md")
    args = parser.parse_args()
    rows: list[Row] = []
    failed: list[str] = []
    for path in sorted(HERE.glob("bench_*.py")):
        name = path.stem.removeprefix("bench_")
        if args.packages and name not in args.packages:
            continue
        try:
            for row in _load(path).rows(args.quick):
                rows.append(row)
                print(list(table([row]))[-1], flush=True)
        except Exception:  # One package's fault must not cost the hour that the others took.
            traceback.print_exc()
            failed.append(name)
        args.output.write_text("\n".join(_page(rows, failed, args.quick)) + "\n")
    print(f"wrote {args.output}")
    if failed:
        sys.exit(f"did not finish: {', '.join(failed)}")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _page(rows: list[Row], failed: list[str], quick: bool) -> Iterator[str]:
    versions = ", ".join(f"{n} {_version(n)}" for n in ("torch", "executorch", "numpy"))
    command = f"nox -s bench{' -- --quick' if quick else ''}"
    machine = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    yield "# Benchmark results"
    yield ""
    yield f"Made by `{command}` on {datetime.date.today()}: {machine}, {versions}."
    yield "Ours and the peer were measured in turn in the same run; above 1 means ours is better."
    yield ""
    for name in failed:
        yield f"**{name} did not finish: its rows below are not all.**"
        yield ""
    yield from table(rows)
    series = [row for row in rows if row.series]
    if series:
        yield ""
        yield "## Growth"
        for row in series:
            yield ""
            yield f"**{row.package}: {row.case}**"
            yield ""
            yield "| size | ours | peer |"
            yield "|---:|---:|---:|"
            for size, ours, peer in row.series:
                yield f"| {size:g} | {ours:.4g} | {'' if peer is None else f'{peer:.4g}'} |"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
