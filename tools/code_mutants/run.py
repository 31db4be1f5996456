"""Draw mutants of each area, run the tests that reach them, and keep what came of each.

``python -m tools.code_mutants.run [AREA...] [--count 40] [--seed 16] [--again]``
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tools.code_mutants import trial
from tools.code_mutants.mutants import Mutant, sample
from tools.workspace import ROOT

STATE = ROOT / "out/code-mutants"
AREAS = Path(__file__).with_name("areas.toml")


def main() -> None:
    """Try the mutants of the areas that are named, and list those that no test noticed."""
    areas = tomllib.loads(AREAS.read_text())
    parser = argparse.ArgumentParser()
    parser.add_argument("areas", nargs="*", metavar="AREA", help=", ".join(areas))
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--again", action="store_true", help="try survivors once more")
    chosen = parser.parse_args()
    STATE.mkdir(parents=True, exist_ok=True)
    # tests/interop and the packages import it; a fork has it already.
    trial.preload("torch")
    for name in chosen.areas or areas:
        _try_area(name, areas[name], chosen)


def _try_area(name: str, area: dict[str, list[str]], chosen: argparse.Namespace) -> None:
    paths = _files(area["sources"])
    seconds, reach = _baseline(name, area["tests"], paths)
    records = _records(name)
    drawn = sample(paths, chosen.count, chosen.seed)
    for mutant in drawn:
        known = records.get(mutant.identity())
        if known is None or (chosen.again and known["outcome"] == "survived"):
            record = _try_mutant(mutant, seconds, reach, STATE / f"{name}.log")
            records[record["id"]] = record
            with (STATE / f"{name}.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(
                f"{name}: {record['place']} {record['operator']} {record['outcome']}", flush=True
            )
    survivors = [r for m in drawn if (r := records[m.identity()])["outcome"] == "survived"]
    for record in survivors:
        print(f"\n{record['place']} ({record['tests']} tests reach it)\n{record['change']}")
    print(f"{name}: {len(drawn) - len(survivors)} of {len(drawn)} noticed\n", flush=True)


def _files(sources: list[str]) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        path = ROOT / source
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        if not files or not files[0].exists():
            sys.exit(f"{source} is not there: mend {AREAS.name}")
        found += files
    return found


def _records(name: str) -> dict[str, dict[str, Any]]:
    path = STATE / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["id"]: record for record in map(json.loads, lines)}


def _baseline(
    name: str, tests: list[str], paths: list[Path]
) -> tuple[dict[str, float], trial.Reach]:
    """Return each test's time, and what it reaches; measured again when any file changed."""
    files = [*paths, *(p for test in tests for p in sorted((ROOT / test).parent.rglob("*.py")))]
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()
    path = STATE / f"{name}.reach.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    if known.get("digest") != digest:

        def watch() -> int:
            watcher = trial.Watcher(paths)
            watcher.coverage.start()
            status = trial.run_tests(tests, watcher)
            watcher.coverage.stop()
            for test in watcher.failed:
                watcher.seconds.pop(test, None)
            found = {"digest": digest, "seconds": watcher.seconds, "reach": watcher.reach()}
            path.write_text(json.dumps({**found, "failed": watcher.failed}))
            return status

        began = time.monotonic()
        if trial.in_child(watch, 7200, STATE / f"{name}.log") not in {
            0,
            pytest.ExitCode.TESTS_FAILED,
        }:
            sys.exit(f"{name}: its tests do not run: see {STATE / f'{name}.log'}")
        print(f"{name}: {time.monotonic() - began:.0f} s for all tests", flush=True)
        known = json.loads(path.read_text())
        for test in known["failed"]:
            print(f"{name}: {test} fails without any change, and is left out", flush=True)
    reach = {f: {int(line): t for line, t in lines.items()} for f, lines in known["reach"].items()}
    return known["seconds"], reach


def _try_mutant(
    mutant: Mutant, seconds: dict[str, float], reach: trial.Reach, log: Path
) -> dict[str, Any]:
    lines = trial.statement_lines(mutant.path, mutant.line)
    touched = reach.get(str(mutant.path), {})
    names = (
        seconds
        if lines is None
        else {t for line in lines for t in touched.get(line, ())} & set(seconds)
    )
    chosen = {test: seconds[test] for test in names}
    source = mutant.source()

    def test() -> int:
        sys.meta_path.insert(0, trial.Replaced(mutant.path, source))
        files = sorted({test.split("::")[0] for test in chosen})
        return trial.run_tests(files, trial.Chosen(chosen), "-x")

    began = time.monotonic()
    # Without any test that reaches it there is nothing to run.
    status = trial.in_child(test, 120 + 5 * sum(chosen.values()), log) if chosen else 0
    return {
        "id": mutant.identity(),
        "place": f"{mutant.path.relative_to(ROOT)}:{mutant.line}",
        "operator": mutant.operator.removeprefix("core/"),
        "outcome": "survived" if status in {0, pytest.ExitCode.NO_TESTS_COLLECTED} else "noticed",
        "status": status,
        "tests": len(chosen),
        "seconds": round(time.monotonic() - began, 1),
        "change": _change(mutant.path.read_text(), source),
    }


def _change(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if line[:1] in "+-" and line[:3] not in {"---", "+++"})


if __name__ == "__main__":
    main()
