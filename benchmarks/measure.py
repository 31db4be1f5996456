"""Measure one package in this process: ``measure.py PACKAGE RECORD COMMAND [--quick] [--models]``.

``run.py`` starts it, once for each package, so that what one leaves in memory costs no other.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import table
from benchmarks.records import Record, state_of


def main() -> None:
    """Measure, print each row as it comes, and keep them all in the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package")
    parser.add_argument("record", type=Path)
    parser.add_argument("command")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", nargs="+", default=[])
    args = parser.parse_args()
    system = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    record = Record(
        *(args.package, args.command, args.quick, state_of(args.package)),
        machine=system,
        versions=", ".join(
            f"{name} {_version(name)}" for name in ("torch", "executorch", "numpy")
        ),
        cores=os.cpu_count() or 0,
        started=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        load_before=os.getloadavg()[0],
    )
    record.save(args.record)  # Whatever happens next, no older record passes for this run's.
    start = time.perf_counter()
    try:
        bench = importlib.import_module(f"benchmarks.bench_{args.package}")
        some = {"models": args.models} if args.models else {}
        for row in bench.rows(args.quick, **some):
            record.rows.append(row)
            print(list(table([row]))[-1], flush=True)
            record.save(args.record)
        record.finished = True
    except Exception as error:
        record.error = f"{type(error).__name__}: {error}".splitlines()[0]
        raise
    finally:
        record.wall = time.perf_counter() - start
        record.load_after = os.getloadavg()[0]
        record.save(args.record)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
