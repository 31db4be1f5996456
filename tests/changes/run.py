"""Change random hierarchies by the thousand beside eager: sharded, resumable, each in a fork.

    nox -s changes -- [FIRST PAST] [--shard 1/4] [--records FILE] [--seconds N]

Without seeds it takes 2,000 that no earlier day had. What is recorded is not run again; the
summary counts all records.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packages/unflatten/tests"))

import random_alone
import random_changes
import torch
from random_changes import Outcome, check_seed, form_of

from lowerdeck.decompose import decompose
from tests.interop.forks import run_in_fork

A_NIGHT = 2000
SECONDS = 180
_WAITS = 30
WELL = frozenset({"same", "no export", "another program", "refused"})
"""Outcomes that are no fault of ours."""

OURS = ("lowerdeck preserving", "lowerdeck strict preserving", "lowerdeck plain all")
"""Forms of programs that are decomposed by ours."""

random_changes.DECOMPOSED["lowerdeck"] = decompose

Record = Mapping[str, Any]


def of_seed(seed: int) -> Record:
    """Return what came of one seed, run in a fork of this process."""
    found, failed = run_in_fork(lambda: _findings(seed), SECONDS, _WAITS)
    if found:
        return found[0]
    return asdict(Outcome(seed, "", outcome="wrong", detail=failed))


def _findings(seed: int) -> Iterator[Record]:
    try:
        form = form_of(seed, (*random_changes.FORMS, *OURS))
        found = asdict(check_seed(seed, form=form))
        alone = form_of(seed, (*random_alone.FORMS, OURS[0]))
        yield {**found, "alone": dict(random_alone.check_seed(seed, form=alone))}
    except Exception as error:
        told = "".join(traceback.format_exception(error, limit=-3))
        yield asdict(Outcome(seed, "", outcome="wrong", detail=told[-1500:]))


def summary(records: Iterable[Record]) -> str:
    """Return the figures of many records in words."""
    rows = list(records)
    outcomes = Counter(row["outcome"] for row in rows)
    changed = sum(bool(row["changes"]) for row in rows if row["outcome"] == "same")
    changes = sum((Counter(row["changes"]) for row in rows), Counter())
    table = sum((Counter(row["refused"]) for row in rows if "plain" not in row["form"]), Counter())
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    alone = sum((Counter(row.get("alone")) for row in rows), Counter())
    odd = Counter(" ".join(row.get("odd") or ("none", "same")) for row in rows)
    decomposed = [row for row in rows if random_changes.is_decomposed(row["form"])]
    same = Counter(row["outcome"] for row in decomposed)["same"]
    lines = [
        f"{len(rows)} hierarchies: {told}; {changed} of them changed, in {changes.total()} places",
        ", ".join(f"{count} {kind}" for kind, count in changes.most_common()),
        ", ".join(f"{count} {what}" for what, count in sorted(odd.items()) if "none" not in what),
        f"{same} of {len(decomposed)} decomposed ones are the same",
        "alone: " + ", ".join(f"{count} {what}" for what, count in sorted(alone.items())),
        f"modules with signatures: {table['allowed']} of {table.total()} replaceable",
        *(f"{count:6} {why}" for why, count in table.most_common() if why != "allowed"),
    ]
    bad = [row for row in rows if row["outcome"] not in WELL]
    return "\n".join([*lines, *(f"seed {row['seed']}: {row['detail']}" for row in bad)])


def main() -> int:
    """Run the seeds that the command line names; return 1 if anything was wrong."""
    tonight = int(time.time() // 86400) * A_NIGHT
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int, nargs="?", default=tonight)
    parser.add_argument("past", type=int, nargs="?")
    parser.add_argument("--shard", default="1/1", help="N/M: the Nth of M parts of the seeds")
    parser.add_argument("--records", type=Path, default=Path("out/changes.jsonl"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    args = parser.parse_args()
    number, of = map(int, args.shard.split("/"))
    past = args.first + A_NIGHT if args.past is None else args.past
    args.records.parent.mkdir(parents=True, exist_ok=True)
    known: list[Record] = []
    if args.records.exists():
        known = [json.loads(line) for line in args.records.open()]
    done = {row["seed"] for row in known}
    end = time.monotonic() + args.seconds
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # What torch imports and fills when it first exports is then there in each fork.
    check_seed(0)
    with args.records.open("a") as records:
        for seed in range(args.first + number - 1, past, of):
            if seed in done:
                continue
            if time.monotonic() > end:
                break
            known.append(of_seed(seed))
            print(json.dumps(known[-1]), file=records, flush=True)
    print(summary(known))
    return int(any(row["outcome"] not in WELL for row in known))


if __name__ == "__main__":
    sys.exit(main())
