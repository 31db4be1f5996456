"""A share of the session ``mutants``: damaged files that verify accepts end no process."""

from __future__ import annotations

from pathlib import Path

from lowerdeck.serializer import verify_pte
from tests.interop import mutants

SHARE = 600
CORPUS = Path(__file__).parent / "corpus"


def test_good_files_are_accepted_and_run(tmp_path: Path) -> None:
    files = [(file, mutants.calls_of(verify_pte(file))) for _, file in mutants.good_files()]
    assert mutants.run_batch(files, tmp_path) == ["ran"] * len(files)


def test_no_accepted_mutant_ends_or_hangs_the_runtime(tmp_path: Path) -> None:
    corpus = sorted(CORPUS.glob("*.pte"))
    files = [*mutants.good_files(), *((path.name, path.read_bytes()) for path in corpus)]
    figures, bad = mutants.search(files, range(SHARE), tmp_path)
    assert not bad
    assert figures["made"] == SHARE
    assert figures["accepted"] > SHARE // 10
    assert figures["refused"] > SHARE // 10
