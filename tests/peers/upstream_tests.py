"""ExecuTorch's own tests, with exir as it is and with exir_compat under its names: how many pass?

The wheel has them. Those of `to_backend`, partitioners, programs and emission run twice, the
second time with the names that callers type replaced by ours before a test is imported; their
other imports, such as demo backends and the classes of the schema, stay ExecuTorch's. What passes
only the first time is listed with what it raised.

    python tests/peers/upstream_tests.py [FOLDER OR FILE OF executorch/exir ...]

It takes minutes, and is no test itself: what tests ask of exir's own inner parts (where it puts
values, what it cannot do) we do not promise. Each test that fails with ours alone stands, with
its reason, in `upstream_left.toml`; one that does not ends this with status 1, and so does one
that stands there and passes.
"""

from __future__ import annotations

import collections
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ASKED = ("backend/test", "program/test", "emit/test")
_OURS = "LOWERDECK_INSTEAD_OF_EXIR"
_REPORT = "LOWERDECK_REPORT"
# By ExecuTorch's modules: the names that are replaced there, and by which package's.
_MANAGERS = (
    "EdgeCompileConfig",
    "EdgeProgramManager",
    "ExecutorchBackendConfig",
    "ExecutorchProgramManager",
    "to_edge",
    "to_edge_transform_and_lower",
)
_LOWERING = ("MethodProgramsPartitionerSpec", "to_backend")
REPLACED = {
    "executorch.exir": ("lowerdeck.exir_compat", _MANAGERS),
    "executorch.exir.program": ("lowerdeck.exir_compat", _MANAGERS),
    "executorch.exir.program._program": ("lowerdeck.exir_compat", _MANAGERS),
    "executorch.exir.emit": ("lowerdeck.exir_compat", ("emit_program",)),
    "executorch.exir.backend.backend_api": ("lowerdeck.lowered_module", _LOWERING),
}
_LEFT = Path(__file__).with_name("upstream_left.toml")
_APART = "apart"
_found: dict[str, list[str]] = {}


def pytest_configure() -> None:
    """Put our names into ExecuTorch's modules, where this run is asked to."""
    if _OURS not in os.environ:
        return
    # Ours first, as they ask nothing of exir; all of exir before any of its names is replaced.
    importlib.import_module("executorch.exir")
    for module in REPLACED:
        importlib.import_module(module)
    for module, (package, names) in REPLACED.items():
        for name in names:
            if hasattr(sys.modules[module], name):
                setattr(sys.modules[module], name, getattr(importlib.import_module(package), name))


def pytest_runtest_logreport(report: Any) -> None:
    """Keep what came of each test; one whose subtest fails, fails."""
    if report.when == "call" or report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        told = _found.setdefault(report.nodeid, ["passed", ""])
        if told[0] == "passed":
            _found[report.nodeid] = [report.outcome, crash.message if crash else ""]


def pytest_sessionfinish() -> None:
    """Write what was kept."""
    if _REPORT in os.environ:
        Path(os.environ[_REPORT]).write_text(json.dumps(_found))


def outcomes(asked: list[str], *, ours: bool) -> dict[str, list[str]]:
    """Return what came of each test: its outcome, and what it raised.

    Args:
        asked: Folders or files, below ``executorch/exir``.
        ours: Whether our names stand in for exir's.
    """
    spec = importlib.util.find_spec("executorch.exir")
    if spec is None or spec.origin is None:
        raise SystemExit("executorch.exir is not installed: nox -s peers installs it")
    base = Path(spec.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), _REPORT: str(report)}
        environment |= {_OURS: "1"} if ours else {}
        subprocess.run(
            [
                *(sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-c", os.devnull),
                *("--rootdir", str(base), "--import-mode=importlib", "-p", "no:cacheprovider"),
                *("-p", "tests.peers.upstream_tests", "-W", "ignore", "--tb=short"),
                *("--continue-on-collection-errors", *(str(base / one) for one in asked)),
            ],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        found: dict[str, list[str]] = json.loads(report.read_text())
        return found


def main(asked: list[str]) -> None:
    """Print how many tests of each file pass with exir, and how many of those with ours.

    Args:
        asked: Folders or files, below ``executorch/exir``.
    """
    left = _left()
    peers, ours = (outcomes(asked or [*ASKED], ours=one) for one in (False, True))
    passing = [name for name, (outcome, _) in peers.items() if outcome == "passed"]
    files: dict[str, list[int]] = {}
    reasons: dict[str, list[str]] = collections.defaultdict(list)
    unexplained = 0
    for name in passing:
        row = files.setdefault(name.partition("::")[0], [0, 0])
        outcome, raised = ours.get(name, ["missing", "not collected"])
        row[0] += 1
        row[1] += outcome == "passed"
        known = left.get(name.rpartition("::")[2])
        if outcome != "passed" and known is not None:
            reasons[known].append(name.rpartition("::")[2])
        elif outcome != "passed":
            unexplained += 1
            first = re.sub(r"0x[0-9a-f]+", "0x", raised.partition("\n")[0])[:150]
            reasons[first].append(name.rpartition("::")[2])
    print("| file | pass with exir | of those, with exir_compat |\n|---|---|---|")
    for file, (there, here) in sorted(files.items()):
        print(f"| {file} | {there} | {here} |")
    both = sum(here for _, here in files.values())
    print(
        f"\n{both} of {len(passing)} ({both / max(1, len(passing)):.0%}); with exir itself ",
        end="",
    )
    print(f"{len(peers) - len(passing)} of {len(peers)} fail or are skipped.\n")
    apart = sum(len(names) for reason, names in reasons.items() if reason.startswith(_APART))
    both_can = len(passing) - apart
    print(f"Of the {both_can} that ask for what both can have, {both / max(1, both_can):.1%}.\n")
    for raised, names in sorted(reasons.items(), key=lambda one: -len(one[1])):
        print(f"{len(names)} x {raised}\n    {', '.join(names)}")
    failed = {test for tests in reasons.values() for test in tests}
    run = {name.rpartition("::")[2] for name in passing}
    for test in sorted((left.keys() & run) - failed):
        print(f"{test} stands in {_LEFT.name}, and passes: take it out")
        unexplained += 1
    if unexplained:
        raise SystemExit(1)


def _left() -> dict[str, str]:
    """Return why each test that is known to fail does: whether it is counted, and the reason."""
    kinds = tomllib.loads(_LEFT.read_text())["kind"]
    return {
        test: f"{'counted' if each['counted'] else _APART}: {each['why']}"
        for each in kinds
        for test in each["tests"]
    }


if __name__ == "__main__":
    main(sys.argv[1:])
