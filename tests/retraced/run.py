"""Take programs apart by the thousand beside torch: sharded, resumable, each group in a fork.

    nox -s retraced -- raw writes zoo models operators [--shard 1/4] [--records FILE] [--seconds N]

What is recorded is not run again; the summary counts all records.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests import resumable
from tests.interop.forks import run_in_fork
from tests.retraced.groups import findings, groups
from tests.retraced.judge import WELL, Finding

SECONDS = 600
"""Of CPU time a group."""
_WAITS = 10


def warm_up() -> None:
    """Take one program apart here: what torch imports and fills is then there in each fork."""
    torch.set_num_threads(1)
    list(findings("raw/1"))


def run_group(group: str, *, seconds: int = SECONDS) -> list[Finding]:
    """Return what came of one group, run in a fork of this process.

    Args:
        group: Its name.
        seconds: CPU time after which the fork ends.
    """

    def work() -> Iterator[Mapping[str, Any]]:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        yield from map(asdict, findings(group))

    rows, failed = run_in_fork(work, seconds, _WAITS)
    return [Finding(**row) for row in rows] + [Finding(group, "", "failed", failed)] * bool(failed)


def summary(found: Iterable[Finding]) -> str:
    """Return the figures of many findings in words.

    Args:
        found: Findings of any number of groups.
    """
    lines = []
    rows = list(found)
    for kind in sorted({row.group.partition("/")[0] for row in rows}):
        own = [row for row in rows if row.group.partition("/")[0] == kind]
        outcomes = Counter(row.outcome for row in own)
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        whole = sum(bool(row.whole) for row in own)
        count = len({row.group for row in own})
        lines.append(f"{kind}: {count} groups, {len(own)} programs: {told}; {whole} torch's way")
    reasons = Counter(row.whole for row in rows if row.whole)
    lines += [f"{count:6} torch's way: {reason}" for reason, count in reasons.most_common()]
    bad = [row for row in rows if row.outcome not in WELL]
    lines += [f"{row.group} {row.program}: {row.outcome}: {row.detail[:300]}" for row in bad]
    return "\n".join(lines)


def main() -> int:
    """Run the groups that the command line names; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", help="kinds of groups, or groups")
    args = resumable.arguments(parser, "retraced")
    wanted = [g for name in args.names for g in ([name] if "/" in name else groups(name))]
    warm_up()
    rows = resumable.records(args, wanted, "group", lambda group: map(asdict, run_group(group)))
    known = [Finding(**row) for row in rows]
    print(summary(known))
    return int(any(row.outcome not in WELL for row in known))


if __name__ == "__main__":
    sys.exit(main())
