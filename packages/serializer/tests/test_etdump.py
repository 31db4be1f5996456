"""ETDump files, as far as they can be told without ExecuTorch: ``tests/interop`` reads them."""

import struct
from pathlib import Path
from typing import Any

import pytest

from lowerdeck.serializer import (
    ProfileEvent,
    ProgramError,
    RunData,
    serialize_etdump,
    write_etdump,
)


def test_the_file_begins_with_its_own_size_and_is_whole(tmp_path: Path) -> None:
    events = [ProfileEvent("native_call_add.out", 5, 9, instruction_id=3)]
    file = serialize_etdump([RunData(events=events), RunData("Load")])
    size, root, identifier = struct.unpack_from("<II4s", file)
    assert (size, identifier) == (len(file) - 4, b"ED00")
    assert 0 < root < size
    assert write_etdump([RunData(events=events), RunData("Load")], tmp_path / "p.etdp") == len(
        file
    )
    assert (tmp_path / "p.etdp").read_bytes() == file


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"instruction_id": 1 << 31}, "instruction_id: found 2147483648"),
        ({"chain_index": None}, "chain_index: found None"),
        ({"start_time": -1}, "start_time: found -1, expected an integer from 0"),
        ({"end_time": 1.5}, "end_time: found 1.5"),
        ({"delegate_debug_id": 1 << 40}, "delegate_debug_id: found"),
        ({"delegate_debug_id": 1.5}, "delegate_debug_id: found 1.5"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    event = ProfileEvent(**{"name": "x", "start_time": 0, "end_time": 1, **changes})
    with pytest.raises(ProgramError, match=rf"run_data\[1\]\.events\[0\]\.{told}"):
        write_etdump([RunData(), RunData(events=[event])], tmp_path / "p.etdp")
    assert not list(tmp_path.iterdir())
