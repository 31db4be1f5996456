"""The script, given external data."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowerdeck.script import main
from lowerdeck.serializer import ExternalEntry, ScalarType, TensorLayout, serialize_ptd, write_ptd

OFFICIAL = Path(__file__).parent / "data/external_ptd.ptd"
PROGRAM = OFFICIAL.with_suffix(".pte")


def test_inspect_tells_the_entries_largest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(OFFICIAL)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "external_ptd.ptd: 23.7 kB, external data, schema version 0, 11 entries"
    assert lines[2].split(maxsplit=4)[:4] == ["18.4", "kB", "77.8", "%"]
    assert lines[2].endswith("  float32[32, 16, 3, 3]  c2.weight")
    assert lines[-1].endswith("  int64[]                b1.num_batches_tracked")


def test_inspect_tells_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--json", str(OFFICIAL)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "ptd"
    assert told["size"] == OFFICIAL.stat().st_size
    assert told["entries"][0] == {
        "key": "c2.weight",
        "size": 18432,
        "alignment": 128,
        "kind": "tensor",
        "text": "float32[32, 16, 3, 3]",
        "dtype": "float32",
        "sizes": [32, 16, 3, 3],
        "dim_order": [0, 1, 2, 3],
    }


def test_inspect_cuts_long_lists_and_shields_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "many.bin"  # the name tells nothing, the identifier does
    entries = {f"{i:02}": ExternalEntry(bytes(4)) for i in range(24)}
    write_ptd(entries | {"\x1b[2Jgone": ExternalEntry(bytes(8))}, path)
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[2Jgone" in out
    assert out.splitlines()[-1] == "    ... and 5 more (--json shows all)"


def test_empty_data_are_shown_and_have_no_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "none.ptd")
    write_ptd({}, path)
    assert main(["inspect", path]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("0 entries")
    assert main(["verify", path]) == 0
    assert main(["inspect", path, "--html", str(tmp_path / "page.html")]) == 2
    assert "leave --html away" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["none.ptd"]


def test_verify_takes_both_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(OFFICIAL), str(PROGRAM)]) == 0
    assert capsys.readouterr().out == f"{OFFICIAL}: ok\n{PROGRAM}: ok\n"


def test_verify_tells_whether_data_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "-q", str(PROGRAM), "--data", str(OFFICIAL)]) == 0
    other = tmp_path / "other.ptd"
    layout = TensorLayout(ScalarType.FLOAT, [2], [0])
    write_ptd({"c2.weight": ExternalEntry(bytes(8), layout)}, other)
    assert main(["verify", "-q", str(PROGRAM), "--data", str(other)]) == 3
    told = capsys.readouterr().err
    assert told.startswith(f"lowerdeck verify: {PROGRAM}: ContentError: external data: ")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.booleans())
def test_damaged_data_are_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, seed: int, cut: bool
) -> None:
    rng = random.Random(seed)
    layout = TensorLayout(ScalarType.FLOAT, [2, 2], [0, 1])
    whole = serialize_ptd({str(i): ExternalEntry(bytes(16), layout, 16) for i in range(3)})
    damaged = bytearray(whole[: rng.randrange(len(whole))] if cut else whole)
    for _ in range(0 if cut else rng.randrange(1, 4)):
        damaged[rng.randrange(8, len(damaged))] = rng.randrange(256)
    path = tmp_path_factory.getbasetemp() / "damaged.ptd"
    path.write_bytes(damaged)
    # Neither crashes: the verdict of one is the verdict of the other.
    verdict = main(["verify", "-q", str(path)])
    assert verdict in (0, 3)
    assert main(["inspect", str(path)]) == verdict
