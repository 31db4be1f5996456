"""Run random raw programs by the thousand: sharded, resumable, each in a process of its own.

    nox -s soak -- 0 10000 [--shard 1/4] [--records FILE]

Torch and the official runtime are imported once; a fork of this process runs each seed, so that
a crash ends that seed only. A few seeds run here first: what torch imports and fills when it first
exports, half of a seed's time, is then there in each fork. What is recorded is not run again. The
summary counts all records.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from lowerdeck_zoo import official
from tests import resumable
from tests.interop.forks import run_in_fork
from tests.soak.check import ALL, Finding, findings

SECONDS = 120
"""Of CPU time a seed: a busy machine is no reason to end one."""
_WAITS = 30
"""How many times as long a seed may take on the clock, should it sleep and not compute."""

WARM_UP = (1, 2, 3)
"""Seeds that are known to be right in every way: they are run before this process forks."""


def warm_up() -> None:
    """Run a few seeds in this process, so that each fork begins with torch's caches filled."""
    torch.set_num_threads(1)
    lib = importlib.import_module(str(official.binding_name()))
    for seed in WARM_UP:
        list(findings(seed, lib))


def run_seed(seed: int, ways: Iterable[str] = ALL, *, seconds: int = SECONDS) -> list[Finding]:
    """Return what came of one seed, run in a fork of this process.

    Args:
        seed: The program.
        ways: Which ways of it.
        seconds: CPU time after which the fork ends.

    Returns:
        The findings; the last one says so if the process died or did not end.
    """
    lib = importlib.import_module(str(official.binding_name()))

    def work() -> Iterator[Mapping[str, Any]]:
        torch.set_num_threads(1)
        yield from map(asdict, findings(seed, lib, ways))

    rows, failed = run_in_fork(work, seconds, _WAITS)
    found = [Finding(**row) for row in rows]
    if failed:
        last = found[-1].way if found else "nothing"
        found.append(Finding(seed, f"after {last}", "crashed", failed))
    return found


def summary(found: Iterable[Finding]) -> str:
    """Return the figures of many findings in words.

    Args:
        found: Findings of any number of seeds.
    """
    rows = list(found)
    seeds = {row.seed for row in rows}
    outcomes = Counter(row.outcome for row in rows)
    refused = {row.seed for row in rows if row.outcome == "refused"}
    lines = [
        f"{len(seeds)} programs, {len(rows)} results: "
        + ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())),
        f"refused: {len(refused)} programs, {len(refused) / max(1, len(seeds)):.2%}",
    ]
    reasons = Counter(_reason(row) for row in rows if row.outcome in ("refused", "torch"))
    lines += [f"{count:6} {reason}" for reason, count in reasons.most_common()]
    bad = [row for row in rows if row.outcome in ("wrong", "failed", "crashed")]
    lines += [f"seed {row.seed}, {row.way}: {row.outcome}: {row.detail[:160]}" for row in bad]
    return "\n".join(lines)


def _reason(row: Finding) -> str:
    """Return a refusal without the names that differ from program to program."""
    kind, _, rest = row.detail.partition(":")
    told = rest.rpartition("(")[2] if "torch cannot make" in rest else rest
    return f"{row.outcome} {kind}: {told.strip()[:110]}"


def main() -> int:
    """Run the seeds that the command line names; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("past", type=int)
    args = resumable.arguments(parser, "soak")
    warm_up()
    seeds = range(args.first, args.past)
    rows = resumable.records(args, seeds, "seed", lambda seed: map(asdict, run_seed(seed)))
    known = [Finding(**row) for row in rows]
    print(summary(known))
    return int(any(row.outcome in ("wrong", "failed", "crashed") for row in known))


if __name__ == "__main__":
    sys.exit(main())
