"""Change thousands of random hierarchies and compare with eager: sharded, resumable, in forks.

    nox -s changes -- [FIRST PAST] [--shard 1/4] [--records FILE] [--seconds N]

Without seeds it takes 2,000 that no earlier day had. What is recorded is not run again; the
summary counts all records.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packages/unflatten/tests"))

import torch
from unflatten_zoo import judges

from lowerdeck.decompose import decompose
from lowerdeck.unflatten import UnflattenError, unflatten
from tests import resumable
from tests.changes.random_trees import random_case
from tests.interop.forks import run_in_fork

A_NIGHT = 2000
SECONDS = 180
_WAITS = 30
WAYS = (
    *("preserving", "preserving saved", "plain", "strict", "functional"),
    *("strict decomposed", "flat", "lowerdeck"),
)
"""Ways to the programs whose modules are changed; the last is decomposed by ours."""
JUDGES = (judges.judge_copies, judges.judge_exported_again, judges.judge_compiled)

Record = Mapping[str, Any]


def _hook(model: torch.nn.Module, path: str, _: torch.nn.Module) -> None:
    module = model.get_submodule(path)
    module.register_forward_hook(lambda _, args, result: judges.scaled(result, 1.25))


# A wrapper would be of another class, by which these models choose what they compute.
CHANGES: dict[str, Callable[..., None]] = {"swapped": judges.replace, "hooked": _hook}


def of_seed(seed: int) -> Record:
    """Return what came of one seed, run in a fork of this process."""
    found, failed = run_in_fork(lambda: _findings(seed), SECONDS, _WAITS)
    return found[0] if found else {"seed": seed, "outcomes": {"whole wrong": 1}, "detail": failed}


def _findings(seed: int) -> Iterator[Record]:
    outcomes, details = Counter[str](), list[str]()

    def note(what: str, run: Callable[[], None]) -> None:
        try:
            run()
        except UnflattenError:
            outcomes[f"{what} refused"] += 1
        except Exception as error:
            outcomes[f"{what} wrong"] += 1
            told = "".join(traceback.format_exception(error, limit=-3))
            details.append(f"{what}: {told[-800:]}")
        else:
            outcomes[f"{what} right"] += 1

    case = random_case(seed, cost=60, odd=seed % 2 == 1)
    way = WAYS[seed % len(WAYS)]
    try:
        if way == "lowerdeck":
            made = unflatten(decompose(case.program("preserving")))
        else:
            made = case.unflattened(way)
    except Exception:
        # Torch cannot export it so; the plainest export is judged by the package's tests.
        yield {"seed": seed, "way": way, "outcomes": {"whole no export": 1}, "detail": ""}
        return
    note("whole", lambda: judges.compare_calls(case, copy.deepcopy(made)))
    if outcomes["whole wrong"] and not _is_right_in_torch(case, way):
        yield {"seed": seed, "way": way, "outcomes": {"whole wrong in torch": 1}, "detail": ""}
        return
    if way == "preserving":
        note("used", partial(JUDGES[seed // len(WAYS) % len(JUDGES)], case))
    original = case.module()
    rows = judges.rows_of(made)
    outcomes["rows replaceable"] = len(rows)
    outcomes["rows marked"] = len(made.swappable()) - len(rows)
    # A module of flat values takes only what the program computes from: no constants, no flags.
    for row in rows[:12] if way != "flat" else ():
        for what, change in CHANGES.items():
            mine, theirs = copy.deepcopy(made), copy.deepcopy(original)
            try:
                for model in (mine, theirs):
                    change(model, row.path, copy.deepcopy(original.get_submodule(row.path)))
                judges.run(copy.deepcopy(theirs), case.calls()[0])
            except Exception:
                outcomes[f"{what} no eager"] += 1
                continue
            note(what, partial(judges.compare_calls, case, mine, theirs))
    yield {"seed": seed, "way": way, "outcomes": dict(outcomes), "detail": "\n".join(details)}


def _is_right_in_torch(case: Any, way: str) -> bool:
    """Return whether torch's own module of the program computes what eager does."""
    way = {"functional": "decomposed", "flat": "plain", "lowerdeck": "preserving"}.get(way, way)
    try:
        judges.compare_calls(case, case.program(way).module())
    except Exception:
        return False
    return True


def summary(records: Iterable[Record]) -> str:
    """Return the figures of many records in words."""
    rows = list(records)
    outcomes = sum((Counter(row["outcomes"]) for row in rows), Counter())
    bad = [row for row in rows if is_bad(row)]
    lines = [f"{count:8} {what}" for what, count in sorted(outcomes.items())]
    told = [f"seed {row['seed']} ({row.get('way')}): {row['detail']}" for row in bad]
    return "\n".join([f"{len(rows)} hierarchies", *lines, *told])


def is_bad(row: Record) -> bool:
    """Return whether something of a record was wrong."""
    return any(what.endswith(" wrong") for what in row["outcomes"])


def main() -> int:
    """Run the seeds that the command line names; return 1 if anything was wrong."""
    tonight = int(time.time() // 86400) * A_NIGHT
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int, nargs="?", default=tonight)
    parser.add_argument("past", type=int, nargs="?")
    args = resumable.arguments(parser, "changes")
    past = args.first + A_NIGHT if args.past is None else args.past
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # What torch imports and fills when it first exports is then there in each fork.
    next(_findings(0))
    seeds = range(args.first, past)
    known = resumable.records(args, seeds, "seed", lambda seed: [of_seed(seed)])
    print(summary(known))
    return int(any(map(is_bad, known)))


if __name__ == "__main__":
    sys.exit(main())
