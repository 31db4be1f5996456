"""Run items one after the other, in shards or for some time, and keep what came of each."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def arguments(parser: argparse.ArgumentParser, name: str) -> argparse.Namespace:
    """Return the parsed command line, with the options that such runs have.

    Args:
        parser: Knows the other arguments.
        name: Of the file of records in ``out``.
    """
    parser.add_argument("--shard", default="1/1", help="N/M: the Nth of M parts")
    parser.add_argument("--records", type=Path, default=Path(f"out/{name}.jsonl"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    return parser.parse_args()


def records(
    args: argparse.Namespace,
    wanted: Sequence[Any],
    key: str,
    run: Callable[[Any], Iterable[Mapping[str, Any]]],
) -> list[Mapping[str, Any]]:
    """Return all records, old and new; an item that has one is not run again.

    Args:
        args: What ``arguments`` returned.
        wanted: The items.
        key: The field of a record that names its item.
        run: Returns the records of an item.
    """
    number, of = map(int, args.shard.split("/"))
    args.records.parent.mkdir(parents=True, exist_ok=True)
    lines = args.records.read_text().splitlines() if args.records.exists() else []
    known = [json.loads(line) for line in lines]
    done, end = {row[key] for row in known}, time.monotonic() + args.seconds
    with args.records.open("a") as file:
        for item in wanted[number - 1 :: of]:
            if item in done:
                continue
            if time.monotonic() > end:
                break
            rows = list(run(item))
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            known += rows
    return known
