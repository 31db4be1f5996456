"""What one package's benchmarks gave, when and under what load, kept so that a page can be remade.

A full run takes the better part of an hour. Each package's record is a separate file, written
row by row.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.harness import Row
from tools.workspace import PACKAGES, ROOT, import_name, siblings


@dataclass(slots=True)
class Record:
    """The rows of one package, with what a reader needs in order to trust or doubt them.

    Attributes:
        package: Import name of the package.
        command: What the reader types to get such rows.
        quick: Whether the sizes were small.
        state: Digest of the sources that were measured.
        machine: Processor, system and interpreter in words.
        versions: Versions of what was measured beside, in words.
        cores: Cores of the machine.
        started: Start in UTC, to the minute.
        load_before: Average number of busy processes in the minute before the start.
        load_after: The same in the last minute of the run, which itself is one of them.
        wall: Seconds from start to end.
        error: Last line of what made it stop; empty when it finished.
        finished: Whether all rows were taken.
        rows: The rows.
    """

    package: str
    command: str
    quick: bool
    state: str
    machine: str = ""
    versions: str = ""
    cores: int = 0
    started: str = ""
    load_before: float = 0.0
    load_after: float = 0.0
    wall: float = 0.0
    error: str = ""
    finished: bool = False
    rows: list[Row] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the record as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Record:
        """Return the record that ``save`` wrote."""
        content = json.loads(path.read_text())
        rows = [Row(**row) for row in content.pop("rows")]
        return cls(**content, rows=rows)


def state_of(package: str) -> str:
    """Return a digest of all sources that a package's benchmarks run."""
    here = Path(__file__).parent
    own = _imported(here / f"bench_{package}.py", {})
    used = {package, *re.findall(r"lowerdeck\.(\w+)", "".join(own.values()))}
    names = {each for each in PACKAGES if import_name(each) in used}
    names |= {sibling for name in names for sibling in siblings(name)}
    paths = [*sorted(own), *sorted((ROOT / "examples").glob("*.py"))]
    for name in sorted(names):
        paths += sorted((ROOT / "packages" / name / "src").rglob("*.py"))
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _imported(path: Path, seen: dict[Path, str]) -> dict[Path, str]:
    """Return the texts of a module of this folder and of those that it imports from here."""
    if path not in seen:
        seen[path] = path.read_text()
        for name in re.findall(r"^from benchmarks\.(\w+) import", seen[path], re.MULTILINE):
            _imported(path.with_name(f"{name}.py"), seen)
    return seen
