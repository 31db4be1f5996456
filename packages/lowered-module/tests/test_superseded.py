"""A backend that moved to another distribution, where the old one is installed beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
from lowerdeck.lowered_module import BackendDetails, PreprocessResult
class MovedBackend(BackendDetails):
    @staticmethod
    def preprocess(edge_program, compile_specs):
        return PreprocessResult(b"")
class MovedPartitioner:
    pass
"""
SCRIPT = """
import json, warnings
from lowerdeck.lowered_module import find_backend, find_partitioner, AmbiguousBackendError
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    {imports}
    found = []
    for find in (find_partitioner, find_backend, find_backend):
        try:
            made = find("MovedBackend")
            found.append((made if isinstance(made, type) else type(made)).__module__)
        except AmbiguousBackendError as error:
            found.append(str(error))
print(json.dumps([found, [str(one.message) for one in told]]))
"""


def install(folder: Path, name: str, extra: str = "") -> None:
    """Make a distribution of one module of its name, which offers both halves."""
    module = name.replace("-", "_")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(MODULE)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[lowerdeck.backends]\nMovedBackend = {module}:MovedBackend\n"
        f"[lowerdeck.partitioners]\nMovedBackend = {module}:MovedPartitioner\n{extra}"
    )


def found_with(folder: Path, imports: str) -> tuple[list[str], list[str]]:
    """Return where the partitioner and the backend come from, and the warnings."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.format(imports=imports)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    found, told = json.loads(done.stdout)
    return found, told


@pytest.mark.parametrize("imports", ["pass", "import a_old, z_new", "import z_new, a_old"])
def test_the_new_one_wins_with_one_warning(tmp_path: Path, imports: str) -> None:
    install(tmp_path, "a-old")
    install(tmp_path, "z-new", "[lowerdeck.supersedes]\na-old = z_new\n")
    found, told = found_with(tmp_path, imports)
    assert found == ["z_new"] * 3
    (message,) = told
    assert "a-old 1.0 and z-new 1.0 both offer 'MovedBackend'" in message


def test_a_class_that_alone_was_imported_is_the_one_meant(tmp_path: Path) -> None:
    install(tmp_path, "a-old")
    install(tmp_path, "z-new", "[lowerdeck.supersedes]\na-old = z_new\n")
    # The class is looked for before anything loads the new module.
    (_, *backends), _ = found_with(tmp_path, "import a_old; find_partitioner = lambda _: 0")
    assert backends == ["a_old"] * 2


def test_without_a_claim_both_are_named(tmp_path: Path) -> None:
    install(tmp_path, "a-old")
    install(tmp_path, "z-new")
    found, told = found_with(tmp_path, "pass")
    assert all("a_old" in message and "z_new" in message for message in found)
    assert told == []
