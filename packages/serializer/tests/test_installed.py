"""Which of the entry points of installed distributions are taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GROUP = "lowerdeck.tests"
OLD = "lowerdeck-tests-old"
SCRIPT = """
import json, sys, warnings
from lowerdeck.serializer import installed_entries
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    found = {}
    for group, name in json.loads(sys.argv[1]):
        found[f"{group} {name}"] = [e.value for e in installed_entries(group, name)]
        with warnings.catch_warnings():
            pass
print(json.dumps([found, [str(one.message) for one in told]]))
"""


def install(folder: Path, name: str, entries: dict[str, dict[str, str]]) -> None:
    """Make a distribution that has metadata and nothing else."""
    info = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = []
    for group, named in entries.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in named.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def asked(folder: Path, *wanted: tuple[str, str | None]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the values that were found for each group and name, and what was warned of."""
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(folder), *([before] if before else [])])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(wanted)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    found, told = json.loads(done.stdout)
    return found, told


@pytest.mark.parametrize("names", [("a-new", "b-old"), ("b-new", "a-old")], ids=["first", "last"])
@pytest.mark.parametrize("spelled", ["{}", "{}_X.y"])
def test_what_supersedes_is_taken_wherever_it_is_and_told_once(
    tmp_path: Path, names: tuple[str, str], spelled: str
) -> None:
    new, old = (f"lowerdeck-tests-{name}-x-y" for name in names)
    other = f"{GROUP}.other"
    install(tmp_path, old, {GROUP: {"N": "o:N", "Own": "o:Own"}, other: {"N": "o:M"}})
    claim = spelled.format(old.removesuffix("-x-y") if "X" in spelled else old)
    install(
        tmp_path,
        new,
        {GROUP: {"N": "n:N"}, other: {"N": "n:M"}, "lowerdeck.supersedes": {claim: "new.module"}},
    )
    found, told = asked(tmp_path, (GROUP, "N"), (GROUP, "N"), (other, "N"), (GROUP, None))
    assert found[f"{GROUP} N"] == ["n:N"]
    assert found[f"{other} N"] == ["n:M"]
    assert sorted(found[f"{GROUP} None"]) == ["n:N", "o:Own"]
    (message,) = told
    assert f"{old} 1.2 and {new} 1.2 both offer 'N'" in message
    assert "import it from new.module, and upgrade or uninstall " + old in message


def test_two_that_say_nothing_of_each_other_are_both_found(tmp_path: Path) -> None:
    for name in ("one", "two"):
        install(tmp_path, f"lowerdeck-tests-{name}", {GROUP: {"N": f"{name}:N"}})
    found, told = asked(tmp_path, (GROUP, "N"))
    assert sorted(found[f"{GROUP} N"]) == ["one:N", "two:N"]
    assert told == []


def test_a_claim_changes_nothing_where_only_one_offers_the_name(tmp_path: Path) -> None:
    install(tmp_path, OLD, {GROUP: {"N": "o:N"}})
    install(tmp_path, "lowerdeck-tests-new", {"lowerdeck.supersedes": {OLD: "new.module"}})
    found, told = asked(tmp_path, (GROUP, "N"), (GROUP, "Absent"))
    assert (found[f"{GROUP} N"], found[f"{GROUP} Absent"], told) == (["o:N"], [], [])


def test_claims_in_a_circle_tell_nothing(tmp_path: Path) -> None:
    names = ("lowerdeck-tests-one", "lowerdeck-tests-two")
    for name, other in (names, names[::-1]):
        entries = {GROUP: {"N": f"{name[-3:]}:N"}, "lowerdeck.supersedes": {other: "module"}}
        install(tmp_path, name, entries)
    found, told = asked(tmp_path, (GROUP, "N"))
    assert sorted(found[f"{GROUP} N"]) == ["one:N", "two:N"]
    assert told == []
