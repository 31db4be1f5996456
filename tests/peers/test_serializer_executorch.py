"""ExecuTorch's own Python serializer reads what we write, and we read what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowerdeck.serializer import deserialize_pte, serialize_pte

serialize = pytest.importorskip("executorch.exir._serialize")
program_module = pytest.importorskip("executorch.exir._serialize._program")

CORPUS = Path(__file__).resolve().parents[1] / "interop" / "corpus"
# The peer reads its schema files by a function that Python has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:read_binary is deprecated:DeprecationWarning")
NAMES = sorted(path.stem for path in CORPUS.glob("*.pte"))


def _read(data: bytes) -> Any:
    return serialize._deserialize_pte_binary(data)


def _methods(file: Any) -> list[Any]:
    """Return the methods of a peer's program, without where delegates have their bytes."""
    for plan in file.program.execution_plan:
        for delegate in plan.delegates:
            delegate.processed = None
    return list(file.program.execution_plan)


@pytest.mark.parametrize("name", NAMES)
def test_each_reads_what_the_other_writes(name: str) -> None:
    original = (CORPUS / f"{name}.pte").read_bytes()
    ours = serialize_pte(deserialize_pte(original))
    blobs = [
        sorted(bytes(entry.data) for entry in _read(data).program.backend_delegate_data)
        for data in (original, ours)
    ]
    assert blobs[0] == blobs[1]
    assert _methods(_read(ours)) == _methods(_read(original))
    file = _read(original)
    theirs = serialize._serialize_pte_binary(
        program_module.PTEFile(program=file.program, named_data=file.named_data),
        extract_delegate_segments=True,
    )
    assert [plan.values for plan in deserialize_pte(bytes(theirs)).execution_plan] == [
        plan.values for plan in deserialize_pte(original).execution_plan
    ]
