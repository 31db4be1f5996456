"""Draw mutants of all packages, run the tests that reach each, and record which of them fail.

``python -m tools.code_mutants.run [--count 300] [--seed 48] [--root FOLDER] [--shard 0/2]``

The sample is text (``out/code-mutants/sample-SEED-COUNT.jsonl``): with ``--root`` the same mutants
are tried on another version of the repository, where their lines are still there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tools.code_mutants import trial
from tools.code_mutants.mutants import Mutant, sample, statement_lines
from tools.workspace import PACKAGES, ROOT

OUT = ROOT / "out/code-mutants"
LONGEST = 600.0
"""Seconds of tests for one mutant; the fastest tests run first."""
AT_IMPORT = 200
"""How many tests, the fastest first, try a mutant that runs when its module is imported."""


def main() -> None:
    """Try the mutants of a sample and print how many a test noticed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=48)
    parser.add_argument("--root", type=Path, default=ROOT, help="the version to try")
    parser.add_argument("--shard", default="0/1", help="INDEX/COUNT of the test files and mutants")
    options = parser.parse_args()
    index, count = map(int, options.shard.split("/"))
    root = options.root.resolve()
    state = OUT / ("here" if root == ROOT else root.name)
    state.mkdir(parents=True, exist_ok=True)
    mutants = drawn = _sample(options.count, options.seed)
    trial.preload(root, "torch")
    suites = [f"packages/{package}/tests" for package in PACKAGES]
    # The long suites only measure and try what the suites of packages did not notice.
    for stage, folders in enumerate([suites, ["tests/interop", "tests/repository"]]):
        records = state / f"stage-{stage}"
        records.mkdir(exist_ok=True)
        files = test_files(root, folders)
        _measure(root, state, mutants, files[index::count])
        measured = [state / "reach" / _flat(file) for file in files]
        if missing := [path.name for path in measured if not path.exists()]:
            sys.exit(f"{len(missing)} test files are still to be measured by the other shards")
        reach = [json.loads(path.read_text()) for path in measured]
        for mutant in mutants[index::count]:
            _try(root, records, mutant, reach)
        mutants = [mutant for mutant in mutants if not _is_noticed(records, mutant)]
    _report(state, drawn)


def _is_noticed(records: Path, mutant: Mutant) -> bool:
    record = records / f"{mutant.identity}.json"
    return record.exists() and json.loads(record.read_text())["outcome"] == "noticed"


def test_files(root: Path, folders: list[str]) -> list[str]:
    """Return the test files of some folders, relative to ``root``."""
    return sorted(
        str(path.relative_to(root))
        for folder in folders
        for path in (root / folder).glob("test_*.py")
    )


def _sample(count: int, seed: int) -> list[Mutant]:
    path = OUT / f"sample-{seed}-{count}.jsonl"
    if not path.exists():
        sources = sorted(ROOT.glob("packages/*/src/**/*.py"))
        drawn = sample(ROOT, sources, count, seed)
        path.write_text("".join(json.dumps(mutant.as_dict()) + "\n" for mutant in drawn))
    return [Mutant(**json.loads(line)) for line in path.read_text().splitlines()]


def _flat(name: str) -> str:
    return name.replace("/", "-") + ".json"


def _measure(root: Path, state: Path, mutants: list[Mutant], files: list[str]) -> None:
    """Record which tests of each file reach which mutant, and how long they take."""
    lines: dict[str, dict[str, list[int] | None]] = {}
    for mutant in mutants:
        applied = mutant.apply(root)
        if applied is not None:
            reached = statement_lines((root / mutant.path).read_text(), applied[1])
            lines.setdefault(str(root / mutant.path), {})[mutant.identity] = (
                None if reached is None else list(reached)
            )
    folder = state / "reach"
    folder.mkdir(exist_ok=True)
    for file in files:
        path = folder / _flat(file)
        if path.exists():
            continue

        def watch(file: str = file, path: Path = path) -> int:
            watcher = trial.Watcher(list(lines))
            status = trial.run_tests([file], watcher)
            found = {
                "file": file,
                "failed": watcher.failed,
                "seconds": {
                    test: seconds
                    for test, seconds in watcher.seconds.items()
                    if test not in watcher.failed
                },
                "reach": watcher.reach(lines),
            }
            path.with_suffix(".part").write_text(json.dumps(found))
            path.with_suffix(".part").rename(path)
            return status

        began = time.monotonic()
        status = trial.in_child(watch, 7200, state / f"{_flat(file)}.log")
        print(f"{file}: {status}, {time.monotonic() - began:.0f} s", flush=True)
        if not path.exists():
            sys.exit(f"{file} does not run: see {state / f'{_flat(file)}.log'}")


def _try(root: Path, state: Path, mutant: Mutant, reach: list[dict[str, Any]]) -> None:
    record = state / f"{mutant.identity}.json"
    applied = mutant.apply(root)
    if record.exists() or applied is None:
        return
    source, line = applied
    seconds = {test: s for one in reach for test, s in one["seconds"].items()}
    if statement_lines((root / mutant.path).read_text(), line) is None:
        package = "/".join(mutant.path.split("/")[:2])
        near = sorted((s, test) for test, s in seconds.items() if test.startswith(package))
        chosen = {test: s for s, test in near[:AT_IMPORT]}
    else:
        names = {test for one in reach for test in one["reach"].get(mutant.identity, ())}
        chosen = {test: seconds[test] for test in names & seconds.keys()}

    def test() -> int:
        sys.meta_path.insert(0, trial.Replaced(root / mutant.path, source))
        files = sorted({test.split("::")[0] for test in chosen})
        return trial.run_tests(files, trial.Chosen(chosen, LONGEST), "-x")

    began = time.monotonic()
    limit = 120 + 5 * min(sum(chosen.values()), LONGEST)
    log = state / f"{mutant.identity}.log"
    status = trial.in_child(test, limit, log) if chosen else 0
    survived = status in {0, pytest.ExitCode.NO_TESTS_COLLECTED}
    result = {
        "outcome": "survived" if survived else "noticed",
        "status": status,
        "tests": len(chosen),
        "seconds": round(time.monotonic() - began, 1),
    }
    record.write_text(json.dumps({**mutant.as_dict(), **result}))
    print(f"{mutant.path}:{line} {mutant.operator} {result['outcome']}", flush=True)


def _report(state: Path, mutants: list[Mutant]) -> None:
    last: dict[str, dict[str, Any]] = {}
    for mutant in mutants:
        for path in sorted(state.glob(f"stage-*/{mutant.identity}.json")):
            last[mutant.identity] = json.loads(path.read_text())
    for record in last.values():
        if record["outcome"] == "survived":
            print(f"\n{record['path']}:{record['line']} ({record['tests']} tests reach it)")
            print(f"{record['before']}-- {record['operator']} -->\n{record['after']}")
    tried, noticed = Counter[str](), Counter[str]()
    for record in last.values():
        package = record["path"].split("/")[1]
        tried[package] += 1
        noticed[package] += record["outcome"] == "noticed"
    for package in sorted(tried):
        print(f"{package}: {noticed[package]} of {tried[package]} noticed")
    print(f"all: {noticed.total()} of {tried.total()} noticed, {len(mutants)} drawn", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
